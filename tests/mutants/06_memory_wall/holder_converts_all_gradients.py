"""Converts the gradients of the whole group to float32 to update one parameter.

caught by: HoldsMasters · one gradient
"""

from solutions import memory_wall as right


class HoldsMasters(right.HoldsMasters):
    def step_one(self, parameter, group):
        gradients = {each: each.grad.float() for each in group["params"] if each.grad is not None}
        super().step_one(parameter, group)
        gradients.clear()
