"""Launches the bucket that has become full, and forgets those that waited behind it.

caught by: LaunchQueue · order
"""

from solutions import overlapped_ddp as right


class LaunchQueue(right.LaunchQueue):
    def add(self, number, place):
        self.buckets[number].pack(place)
        self.missing[number].remove(place)
        if self.launched < len(self.buckets) and not self.missing[self.launched]:
            self.buckets[self.launched].launch()
            self.launched += 1
