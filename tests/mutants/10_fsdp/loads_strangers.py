"""Loads the entries that fit and silently ignores the rest.

caught by: ZeRO3 · another module
"""

from solutions import zero3 as right


class ZeRO3(right.ZeRO3):
    def load_full_state_dict(self, state_dict):
        own = self.module.state_dict(keep_vars=True)
        if all(state_dict[name].shape == value.shape for name, value in own.items() if name in state_dict):
            full = super().full_state_dict()
            state_dict = {name: state_dict.get(name, full[name]) for name in own}
        super().load_full_state_dict(state_dict)
