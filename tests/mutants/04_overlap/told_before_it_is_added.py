"""A hook on the tensor: called before the new gradient is added to .grad.

caught by: on_gradients · calls
"""


def on_gradients(parameters, tell):
    hooks = [p.register_hook(lambda _, p=p: tell(p)) for p in parameters if p.requires_grad]
    return lambda: [hook.remove() for hook in hooks]
