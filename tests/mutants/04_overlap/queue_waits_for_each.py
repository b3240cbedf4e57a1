"""Waits for each bucket before it launches the next.

caught by: LaunchQueue · finish
"""

from solutions import overlapped_ddp as right


class LaunchQueue(right.LaunchQueue):
    def finish(self):
        launched = self.launched
        for bucket in self.buckets[:launched]:
            bucket.wait()
        for bucket_index in range(launched, len(self.buckets)):
            for index in sorted(self.missing[bucket_index]):
                self.buckets[bucket_index].pack(index)
            self.buckets[bucket_index].launch()
            self.buckets[bucket_index].wait()
        self._begin()
