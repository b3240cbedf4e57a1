"""Shares out nothing: each rank's inner optimizer has all of flat, but only its own part is sent.

caught by: ShardedOptimizer · memory
"""

from torch import nn

from solutions import zero1 as right


class ZeRO1(right.ZeRO1):
    def add_param_group(self, param_group):
        super().add_param_group(param_group)
        self.whole = {each: nn.Parameter(each.home.flat.detach()) for each in self.gradients}
        self.inner.param_groups[-1]["params"] = [self.whole[each] for each in self.gradients[-1:]]

    def reduce_gradients(self):
        super().reduce_gradients()
        for each, whole in self.whole.items():
            whole.grad = each.flat
