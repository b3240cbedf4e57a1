"""Keeps using the loaded settings, whatever a scheduler sets later.

caught by: ZeRO1 · plain state
"""

from solutions import zero1 as right


class ZeRO1(right.ZeRO1):
    loaded = None

    def load_state_dict(self, state_dict):
        super().load_state_dict(state_dict)
        self.loaded = [dict(group) for group in self.param_groups]

    def step(self, closure=None):
        now = self.param_groups
        self.param_groups = self.loaded or now
        loss = super().step(closure)
        self.param_groups = now
        return loss
