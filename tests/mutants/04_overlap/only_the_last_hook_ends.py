"""Keeps the handle of the last hook only.

caught by: on_gradients · ends
"""


def on_gradients(parameters, tell):
    for parameter in parameters:
        if parameter.requires_grad:
            hook = parameter.register_post_accumulate_grad_hook(tell)
    return hook.remove
