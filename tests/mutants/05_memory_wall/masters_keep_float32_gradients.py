"""Leaves the float32 gradient on the master: 16 bytes instead of 12 stay, without use.

caught by: MasterWeights · memory
"""

from solutions import memory_wall as right


class MasterWeights(right.MasterWeights):
    def step_one(self, parameter, group):
        inner = self.inner[parameter]
        (master,) = inner.param_groups[0]["params"]
        inner.param_groups[0].update({**group, "params": [master]})
        master.grad = parameter.grad.float()
        inner.step()
        parameter.copy_(master)
