"""Saves every entry in the parameters' precision, which rounds the masters.

caught by: ZeRO1 · loaded masters
"""

import torch

from solutions import zero1 as right


class ZeRO1(right.ZeRO1):
    stepped = False

    def step(self, closure=None):
        self.stepped = True
        return super().step(closure)

    def state_dict(self, to=None):
        gathered = super().state_dict(to)
        parameters = [parameter for group in self.param_groups for parameter in group["params"]]
        for index, state in (gathered or {"state": {}})["state"].items() if self.stepped else ():
            for name, value in state.items():
                if torch.is_tensor(value) and value.dim():
                    state[name] = value.to(parameters[index].dtype).to(value.dtype)
        return gathered
