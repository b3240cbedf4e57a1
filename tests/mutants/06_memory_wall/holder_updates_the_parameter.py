"""Keeps no master: inner updates the bfloat16 parameter itself.

caught by: HoldsMasters · plain
"""

from solutions import memory_wall as right


class HoldsMasters(right.HoldsMasters):
    def step_one(self, parameter, group):
        inner_state = self.state[parameter]
        self.inner.param_groups = [{**group, "params": [parameter]}]
        self.inner.state = {parameter: inner_state}
        self.inner.step()
