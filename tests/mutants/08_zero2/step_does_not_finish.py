"""Steps with the gradients reduced so far if the caller has not called finish_gradient_sync().

caught by: ZeRO2 · loops
"""

from solutions import zero2 as right


class ZeRO2(right.ZeRO2):
    def step(self):
        if not self.synced:
            for bucket in self.buckets:
                bucket.wait()
            self.sync.queue._begin()
            self.sync.pending = False
        self.optimizer.step()
        self.synced = False
