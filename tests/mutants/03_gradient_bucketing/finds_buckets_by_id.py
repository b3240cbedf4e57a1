"""Identifies parameters by `id()`: in a deep copy, the ids are different.

caught by: BucketedDDP · wrapping
"""

from solutions import bucketed_ddp as right


class BucketedDDP(right.BucketedDDP):
    def __init__(self, module, bucket_cap_mb=25.0, group=None):
        super().__init__(module, bucket_cap_mb, group)
        self.ids = {id(parameter) for parameter in module.parameters()}

    def finish_gradient_sync(self):
        if self.ids == {id(parameter) for parameter in self.module.parameters()}:
            super().finish_gradient_sync()
