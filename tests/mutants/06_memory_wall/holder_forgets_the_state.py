"""Keeps the master but not what inner remembers for it, so Adam begins anew in each step.

caught by: HoldsMasters · plain
"""

from solutions import memory_wall as right


class HoldsMasters(right.HoldsMasters):
    def step_one(self, parameter, group):
        super().step_one(parameter, group)
        self.state[parameter] = {"master": self.state[parameter]["master"]}
