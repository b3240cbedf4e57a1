"""Loads the state but keeps its own settings.

caught by: ZeRO1 · another world size
"""

from solutions import zero1 as right


class ZeRO1(right.ZeRO1):
    def load_state_dict(self, state_dict):
        before = [{k: v for k, v in group.items() if k != "params"} for group in self.param_groups]
        super().load_state_dict(state_dict)
        for group, settings in zip(self.param_groups, before, strict=True):
            group.update(settings)
