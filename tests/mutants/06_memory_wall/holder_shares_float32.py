"""Makes a float32 parameter its own master, because .float() does not copy it.

caught by: HoldsMasters · other dtypes
"""

from solutions import memory_wall as right


class HoldsMasters(right.HoldsMasters):
    def step_one(self, parameter, group):
        self.state[parameter].setdefault("master", parameter.detach().float())
        super().step_one(parameter, group)
