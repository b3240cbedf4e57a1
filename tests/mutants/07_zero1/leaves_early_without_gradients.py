"""Returns early on a rank without gradients, so the other ranks wait forever.

caught by: ZeRO1 · loops
"""

from solutions import zero1 as right


class ZeRO1(right.ZeRO1):
    def step(self, closure=None):
        parameters = [parameter for group in self.param_groups for parameter in group["params"]]
        if closure is None and all(parameter.grad is None for parameter in parameters):
            return None
        return super().step(closure)
