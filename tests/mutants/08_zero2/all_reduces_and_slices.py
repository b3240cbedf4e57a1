"""Code in circulation: all-reduce a bucket, then keep one's own part.

caught by: ZeRO2 · wire
"""

from solutions import zero2 as right


class Bucket(right.ShardedBucket):
    def launch(self):
        if self.before is not None:
            self.before.wait()
        flat, group = self.flat, self.home.group
        handle = right.dist.all_reduce(flat, group=group, async_op=True)

        def finish():
            handle.wait()
            return self.home.own(flat).clone()

        self.finish = finish


class ZeRO2(right.ZeRO2):
    bucket_type = Bucket
