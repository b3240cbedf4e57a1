"""Never removes its hooks, so they call into a wrapper that no longer exists.

caught by: OverlappedDDP · several wrappers
"""

import weakref

from solutions import overlapped_ddp as right


def watch_gradients(buckets, on_gradient):
    method = weakref.WeakMethod(on_gradient)
    for bucket_index, bucket in enumerate(buckets):
        for index, parameter in enumerate(bucket.parameters):
            parameter.register_post_accumulate_grad_hook(lambda _, b=bucket_index, i=index: method()(b, i))


class _Sync(right.GradientSync):
    def __init__(self, buckets):
        self.queue, self.enabled, self.pending = right.LaunchQueue(buckets), True, False
        watch_gradients(buckets, self.on_gradient)


class OverlappedDDP(right.OverlappedDDP):
    def __init__(self, module, bucket_cap_mb=25.0, group=None):
        super().__init__(module, bucket_cap_mb, group)
        self.sync = _Sync(self.buckets)
