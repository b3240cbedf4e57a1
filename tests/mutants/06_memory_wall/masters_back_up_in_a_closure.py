"""Keeps a float32 copy of all parameters in a closure, where no attribute shows it.

caught by: MasterWeights · memory
"""

from solutions import memory_wall as right


class MasterWeights(right.MasterWeights):
    def add_param_group(self, param_group):
        super().add_param_group(param_group)
        copies = [parameter.detach().float().clone() for parameter in self.param_groups[-1]["params"]]
        self.hooks = [*getattr(self, "hooks", []), lambda: copies]
