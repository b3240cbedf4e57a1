"""Takes the learning rate of now, and the betas of the start.

caught by: MasterWeights · schedulers
"""

from solutions import memory_wall as right


class MasterWeights(right.MasterWeights):
    def step_one(self, parameter, group):
        inner = self.inner[parameter]
        (master,) = inner.param_groups[0]["params"]
        inner.param_groups[0]["lr"] = group["lr"]
        master.grad = parameter.grad.float()
        inner.step()
        master.grad = None
        parameter.copy_(master)
