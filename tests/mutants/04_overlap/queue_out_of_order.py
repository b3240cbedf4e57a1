"""Launches a bucket as soon as it is full, even if it is not the next in order.

caught by: LaunchQueue · order
"""

from solutions import overlapped_ddp as right


class LaunchQueue(right.LaunchQueue):
    def add(self, bucket_index, index):
        self.buckets[bucket_index].pack(index)
        self.missing[bucket_index].remove(index)
        if not self.missing[bucket_index]:
            self.buckets[bucket_index].launch()
            self.launched += 1
