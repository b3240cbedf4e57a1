"""Copies each group's settings only when the group is added, so schedulers have no effect.

caught by: ZeRO1 · settings
"""

from solutions import zero1 as right


class ZeRO1(right.ZeRO1):
    def update_parameters(self):
        self.inner.step()
        for work in [each.launch_all_gather() for each in self.flat_parameters]:
            work.wait()
        for flat_parameter in self.flat_parameters:
            flat_parameter.shard.grad = None
