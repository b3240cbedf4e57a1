"""Gives inner its defaults instead of the group's settings, so schedulers have no effect.

caught by: HoldsMasters · settings
"""

from solutions import memory_wall as right


class HoldsMasters(right.HoldsMasters):
    def step_one(self, parameter, group):
        super().step_one(parameter, {**group, **self.inner.defaults})
