"""Takes settings when it is built, and never looks at what a scheduler writes.

caught by: MasterWeights · schedulers
"""

from solutions import memory_wall as right


class MasterWeights(right.MasterWeights):
    def step_one(self, parameter, group):
        inner = self.inner[parameter]
        (master,) = inner.param_groups[0]["params"]
        master.grad = parameter.grad.float()
        inner.step()
        master.grad = None
        parameter.copy_(master)
