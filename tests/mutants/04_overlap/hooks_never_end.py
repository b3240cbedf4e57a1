"""Gives back a function that does nothing.

caught by: on_gradients · ends
"""

from solutions import overlapped_ddp as right


def on_gradients(parameters, tell):
    right.on_gradients(parameters, tell)
    return lambda: None
