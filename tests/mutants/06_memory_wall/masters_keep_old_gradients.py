"""Remembers each gradient and uses it again when there is no new one.

caught by: MasterWeights · no gradient
"""

from solutions import memory_wall as right


class MasterWeights(right.MasterWeights):
    def step(self, closure=None):
        self.old = getattr(self, "old", {})
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    parameter.grad = self.old.get(parameter)
                self.old[parameter] = parameter.grad
        return super().step(closure)
