"""All-reduces a bucket and keeps the rank's shard, as in published code: twice the bytes.

caught by: ZeRO2 · wire
"""

from unittest import mock

from solutions import zero2 as right


class AllReduce:
    def __init__(self, flat, layout):
        self.own = layout.shard_of(flat)
        self.work = right.dist.all_reduce(flat, group=layout.group, async_op=True)

    def wait(self):
        self.work.wait()
        return self.own


class Bucket(right.ShardedBucket):
    def launch(self):
        if self.previous is not None:
            self.previous.wait()
        self.in_flight = AllReduce(self.flat, self.layout)


class ZeRO2(right.ZeRO2):
    def __init__(self, *args, **options):
        with mock.patch.object(right, "ShardedBucket", Bucket):
            super().__init__(*args, **options)
