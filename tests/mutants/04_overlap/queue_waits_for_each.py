"""Waits for each bucket before it launches the next.

caught by: LaunchQueue · finish
"""

from solutions import overlapped_ddp as right


class LaunchQueue(right.LaunchQueue):
    def finish(self):
        launched = self.launched
        for bucket in self.buckets[:launched]:
            bucket.wait()
        for number in range(launched, len(self.buckets)):
            for place in sorted(self.missing[number]):
                self.buckets[number].pack(place)
            self.buckets[number].launch()
            self.buckets[number].wait()
        self._begin()
