"""Ignores changed settings of groups that were added later, so these keep the ones they were added with.

caught by: ZeRO1 · more parameters
"""

from solutions import zero1 as right


class ZeRO1(right.ZeRO1):
    def __init__(self, *args, **defaults):
        super().__init__(*args, **defaults)
        self.first = len(self.param_groups)

    def step(self, closure=None):
        late = [dict(group) for group in self.param_groups[self.first :]]
        for group, inner in zip(self.param_groups[self.first :], self.inner.param_groups[self.first :], strict=True):
            group.update({name: value for name, value in inner.items() if name != "params"})
        loss = super().step(closure)
        for group, now in zip(self.param_groups[self.first :], late, strict=True):
            group.update(now)
        return loss
