"""Does not broadcast the initial state, so the ranks average gradients of different models.

caught by: ManualDDP · same start
"""

from torch import nn

from solutions import manual_ddp as right


class ManualDDP(right.ManualDDP):
    def __init__(self, module, group=None):
        nn.Module.__init__(self)
        self.module, self.group = module, group
