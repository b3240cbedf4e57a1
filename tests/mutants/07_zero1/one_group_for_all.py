"""Updates all groups with the settings of the first.

caught by: ZeRO1 · settings
"""

from solutions import zero1 as right


class ZeRO1(right.ZeRO1):
    def add_param_group(self, param_group):
        if self.inner.param_groups:
            first = {name: value for name, value in self.param_groups[0].items() if name != "params"}
            param_group = {**first, "params": param_group["params"]}
        super().add_param_group(param_group)
