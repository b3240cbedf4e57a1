"""Uses one bucket per parameter: it overlaps, but pays the latency for every parameter.

caught by: OverlappedDDP · wire
"""

from solutions import overlapped_ddp as right


class OverlappedDDP(right.OverlappedDDP):
    def __init__(self, module, bucket_cap_mb=25.0, group=None):
        super().__init__(module, 0.0, group)
