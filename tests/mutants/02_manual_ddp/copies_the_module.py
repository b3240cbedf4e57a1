"""Wraps a copy, so that the optimizer of the original trains nothing.

caught by: ManualDDP · values
"""

import copy

from solutions import manual_ddp as right


class ManualDDP(right.ManualDDP):
    def __init__(self, module, group=None):
        super().__init__(copy.deepcopy(module), group)
