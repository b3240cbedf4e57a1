"""Builds every inner optimizer with the defaults, whatever its group says.

caught by: MasterWeights · groups
"""

from solutions import memory_wall as right


class MasterWeights(right.MasterWeights):
    def add_param_group(self, param_group):
        super().add_param_group(param_group)
        for parameter in self.param_groups[-1]["params"]:
            self.inner[parameter].param_groups[0].update(self.defaults)

    def step_one(self, parameter, group):
        inner = self.inner[parameter]
        (master,) = inner.param_groups[0]["params"]
        master.grad = parameter.grad.float()
        inner.step()
        master.grad = None
        parameter.copy_(master)
