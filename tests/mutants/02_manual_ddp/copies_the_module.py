"""Wraps a copy of the module, so an optimizer over the original parameters trains nothing.

caught by: ManualDDP · values
"""

import copy

from solutions import manual_ddp as right


class ManualDDP(right.ManualDDP):
    def __init__(self, module, group=None):
        super().__init__(copy.deepcopy(module), group)
