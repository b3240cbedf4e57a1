"""Gives inner the caller's group and replaces its parameters by the master.

caught by: HoldsMasters · plain
"""

from torch import nn

from solutions import memory_wall as right


class HoldsMasters(right.HoldsMasters):
    def step_one(self, parameter, group):
        state = self.state[parameter]
        master = nn.Parameter(state.pop("master", parameter.detach().float()))
        master.grad = parameter.grad.float()
        group["params"] = [master]
        self.inner.param_groups = [group]
        self.inner.state = {master: state}
        self.inner.step()
        master.grad = None
        state["master"] = master.detach()
        parameter.copy_(master)
