"""Expects state for every parameter; a plain optimizer has none for a parameter that never had a gradient.

caught by: ZeRO1 · plain state
"""

from solutions import zero1 as right


class ZeRO1(right.ZeRO1):
    def load_state_dict(self, state_dict):
        if state_dict["state"]:
            for group in state_dict["param_groups"]:
                for index in group["params"]:
                    state_dict["state"][index]
        super().load_state_dict(state_dict)
