"""Removes all hooks of the parameters, including those registered by others.

caught by: OverlappedDDP · several wrappers
"""

import weakref

from solutions import overlapped_ddp as right


def watch_gradients(buckets, on_gradient):
    right.watch_gradients(buckets, on_gradient)
    parameters = [parameter for bucket in buckets for parameter in bucket.parameters]
    weakref.finalize(on_gradient.__self__, lambda: [p._post_accumulate_grad_hooks.clear() for p in parameters])


class _Sync(right.GradientSync):
    def __init__(self, buckets):
        self.queue, self.enabled, self.pending = right.LaunchQueue(buckets), True, False
        watch_gradients(buckets, self.on_gradient)


class OverlappedDDP(right.OverlappedDDP):
    def __init__(self, module, bucket_cap_mb=25.0, group=None):
        super().__init__(module, bucket_cap_mb, group)
        self.sync = _Sync(self.buckets)
