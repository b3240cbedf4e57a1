"""Makes every parameter trainable, so only a model without frozen parameters trains correctly.

caught by: fully_sharded · awkward models
"""

from solutions import production as right


def fully_sharded(module, *args, **kwargs):
    return right.fully_sharded(module.requires_grad_(), *args, **kwargs)
