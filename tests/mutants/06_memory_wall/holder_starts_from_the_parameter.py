"""Makes a new master from the rounded parameter in each step.

caught by: HoldsMasters · plain
"""

from solutions import memory_wall as right


class HoldsMasters(right.HoldsMasters):
    def step_one(self, parameter, group):
        self.state[parameter].pop("master", None)
        super().step_one(parameter, group)
