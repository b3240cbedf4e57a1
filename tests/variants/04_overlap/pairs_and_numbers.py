"""Keeps one set of (bucket, index) pairs that are packed, and numbers rounds to tell which gradients are pending."""

import contextlib
from itertools import takewhile

from shared import guards
from solutions.overlapped_ddp import OverlappedDDP, watch_gradients  # noqa: F401


class LaunchQueue:
    def __init__(self, buckets):
        self.buckets, self.packed, self.launched = list(buckets), set(), 0

    @property
    def missing(self):
        pairs = [[(number, index) for index in range(len(b.parameters))] for number, b in enumerate(self.buckets)]
        return [{index for number, index in of_bucket if (number, index) not in self.packed} for of_bucket in pairs]

    def add(self, bucket_index, index):
        self.buckets[bucket_index].pack(index)
        self.packed.add((bucket_index, index))
        ready = takewhile(lambda left: not left, self.missing)
        for bucket in self.buckets[self.launched : sum(1 for _ in ready)]:
            bucket.launch()
            self.launched += 1

    def finish(self):
        rest = [(number, index) for number, left in enumerate(self.missing) for index in left]
        for pair in rest:
            self.add(*pair)
        while self.launched:
            self.launched -= 1
            self.buckets[self.launched].wait()
        self.packed = set()


class GradientSync:
    def __init__(self, buckets):
        self.queue, self.enabled, self.round, self.finished, self.added = LaunchQueue(buckets), True, 1, 1, {}
        watch_gradients(buckets, self.on_gradient)

    @property
    def pending(self):
        return self.round in self.added.values()

    def on_gradient(self, bucket_index, index):
        self.added[bucket_index, index] = self.round
        if self.enabled:
            self.queue.add(bucket_index, index)
            guards.at_end_of_backward(self.synchronize)

    @guards.synchronizes
    def synchronize(self):
        self.queue.finish()
        self.round += 1

    @property
    def done(self):
        return self.round > self.finished

    def finish(self):
        if not self.enabled:
            return
        if not self.done or self.pending:
            self.synchronize()
        self.finished = self.round

    def no_sync(self):
        stack = contextlib.ExitStack()
        stack.callback(setattr, self, "enabled", self.enabled)
        self.enabled = False
        return stack

    def __setstate__(self, state):
        self.__dict__.update(state)
        watch_gradients(self.queue.buckets, self.on_gradient)
