"""Saves buffers under the module's own names, without the prefix "module.".

caught by: ZeRO3 · sharded state
"""

from solutions import zero3 as right


class ZeRO3(right.ZeRO3):
    def sharded_state_dict(self, optimizer):
        state = super().sharded_state_dict(optimizer)
        return {name.removeprefix("module."): value for name, value in state.items()}
