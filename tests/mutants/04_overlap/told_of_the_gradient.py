"""Hands on the gradient instead of the parameter.

caught by: on_gradients · calls
"""

from solutions import overlapped_ddp as right


def on_gradients(parameters, tell):
    return right.on_gradients(parameters, lambda parameter: tell(parameter.grad))
