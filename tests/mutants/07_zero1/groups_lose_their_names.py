"""Keeps only the group settings that the inner optimizer knows and drops any others.

caught by: ZeRO1 · state
"""

from solutions import zero1 as right


class ZeRO1(right.ZeRO1):
    def add_param_group(self, param_group):
        known = {"params", *self.inner.defaults}
        super().add_param_group({name: value for name, value in param_group.items() if name in known})
