"""Takes away other people's hooks with its own.

caught by: on_gradients · ends
"""

from solutions import overlapped_ddp as right


def on_gradients(parameters, tell):
    right.on_gradients(parameters, tell)
    return lambda: [p._post_accumulate_grad_hooks.clear() for p in parameters if p.requires_grad]
