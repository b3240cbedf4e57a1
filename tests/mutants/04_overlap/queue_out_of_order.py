"""Launches a bucket as soon as it is full, though it is not its turn.

caught by: LaunchQueue · order
"""

from solutions import overlapped_ddp as right


class LaunchQueue(right.LaunchQueue):
    def add(self, number, place):
        self.buckets[number].pack(place)
        self.missing[number].remove(place)
        if not self.missing[number]:
            self.buckets[number].launch()
            self.launched += 1
