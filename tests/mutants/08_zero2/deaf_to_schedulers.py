"""Steps with the settings that the optimizer was built with.

caught by: ZeRO2 · state
"""

from solutions import zero2 as right


class Deaf(right.BucketOptimizer):
    def step(self, closure=None):
        groups = [dict(group) for group in self.param_groups]
        for group, inner in zip(self.param_groups, self.inner.param_groups, strict=True):
            group["lr"] = inner["lr"]
        super().step()
        for group, before in zip(self.param_groups, groups, strict=True):
            group["lr"] = before["lr"]


class ZeRO2(right.ZeRO2):
    def __init__(self, *args, **options):
        before, right.BucketOptimizer = right.BucketOptimizer, Deaf
        try:
            super().__init__(*args, **options)
        finally:
            right.BucketOptimizer = before
