"""Lists parameters added later in param_groups but does not give them to the inner optimizer.

caught by: ZeRO1 · more parameters
"""

import torch

from solutions import zero1 as right


class ZeRO1(right.ZeRO1):
    def add_param_group(self, param_group):
        if not self.inner.state:
            return super().add_param_group(param_group)
        torch.optim.Optimizer.add_param_group(self, param_group)
        self.inner.add_param_group({**self.param_groups[-1], "params": []})
