"""Keeps the float32 gradient in the state: 16 bytes per parameter instead of 12.

caught by: HoldsMasters · memory
"""

from solutions import memory_wall as right


class HoldsMasters(right.HoldsMasters):
    def step_one(self, parameter, group):
        super().step_one(parameter, group)
        self.kept = getattr(self, "kept", {})
        self.kept[parameter] = parameter.grad.float()
