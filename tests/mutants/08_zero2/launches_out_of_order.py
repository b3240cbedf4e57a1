"""Launches a bucket as soon as it is full, even if it is not the next in order.

caught by: ZeRO2 · launch order
"""

from solutions import overlapped_ddp
from solutions import zero2 as right


class Queue(overlapped_ddp.LaunchQueue):
    def add(self, bucket_index, index):
        self.buckets[bucket_index].pack(index)
        self.missing[bucket_index].remove(index)
        if not self.missing[bucket_index]:
            self.buckets[bucket_index].launch()


class ZeRO2(right.ZeRO2):
    def __init__(self, *args, **options):
        super().__init__(*args, **options)
        self.sync.queue = Queue(self.buckets)
