"""Registers hooks that keep the wrapper alive: after it is deleted, its module's backward still communicates.

caught by: OverlappedDDP · several wrappers
"""

from solutions import overlapped_ddp as right


class _Sync(right.GradientSync):
    def __init__(self, buckets):
        super().__init__(buckets)
        for parameter in (parameter for bucket in buckets for parameter in bucket.parameters):
            parameter.register_post_accumulate_grad_hook(self._hold_me)

    def _hold_me(self, parameter):
        pass


class OverlappedDDP(right.OverlappedDDP):
    def __init__(self, module, bucket_cap_mb=25.0, group=None):
        super().__init__(module, bucket_cap_mb, group)
        self.sync = _Sync(self.buckets)
