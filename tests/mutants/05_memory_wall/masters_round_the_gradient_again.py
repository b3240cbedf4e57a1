"""Rounds the gradient of a float32 parameter to bfloat16.

caught by: MasterWeights · values
"""

from solutions import memory_wall as right


class MasterWeights(right.MasterWeights):
    def step_one(self, parameter, group):
        inner = self.inner[parameter]
        (master,) = inner.param_groups[0]["params"]
        inner.param_groups[0].update({**group, "params": [master]})
        master.grad = parameter.grad.bfloat16().float()
        inner.step()
        master.grad = None
        parameter.copy_(master)
