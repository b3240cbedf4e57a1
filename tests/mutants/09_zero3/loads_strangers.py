"""Takes what fits, and says nothing of the rest.

caught by: ZeRO3 · foreign state
"""

from solutions import zero3 as right


class ZeRO3(right.ZeRO3):
    def load_full_state_dict(self, state_dict):
        own = self.module.state_dict(keep_vars=True)
        if all(state_dict[name].shape == value.shape for name, value in own.items() if name in state_dict):
            whole = super().full_state_dict()
            state_dict = {name: state_dict.get(name, whole[name]) for name in own}
        super().load_full_state_dict(state_dict)
