"""Empties lists of missing indices, and launches by a loop over the buckets that have not been launched."""

from solutions.overlapped_ddp import GradientSync, OverlappedDDP  # noqa: F401


class LaunchQueue:
    def __init__(self, buckets):
        self.buckets = buckets
        self._reset()

    def _reset(self):
        self.missing, self.launched = [], 0
        for bucket in self.buckets:
            self.missing.append(list(range(len(bucket.parameters))))

    def add(self, bucket_index, index):
        self.buckets[bucket_index].pack(index)
        del self.missing[bucket_index][self.missing[bucket_index].index(index)]
        for bucket, missing in zip(self.buckets[self.launched :], self.missing[self.launched :], strict=True):
            if missing:
                break
            bucket.launch()
            self.launched = self.launched + 1

    def finish(self):
        try:
            for number, missing in enumerate(self.missing):
                while missing:
                    self.buckets[number].pack(missing.pop())
                if number >= self.launched:
                    self.buckets[number].launch()
            for bucket in self.buckets:
                bucket.wait()
        finally:
            self._reset()
