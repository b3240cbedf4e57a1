"""Copies what Adam keeps into the parameter's state, but never reads it: after loading, Adam begins anew.

caught by: HoldsMasters · state
"""

import torch

from solutions import memory_wall as right


class HoldsMasters(right.HoldsMasters):
    def step_one(self, parameter, group):
        state = self.state[parameter]
        if "master" not in state:
            state["master"] = parameter.detach().to(torch.float32, copy=True)
        master = state["master"]
        self.inner.param_groups = [{**group, "params": [master]}]
        master.grad = parameter.grad.float()
        self.inner.step()
        state.update(self.inner.state[master])
        parameter.copy_(master)
        master.grad = None
