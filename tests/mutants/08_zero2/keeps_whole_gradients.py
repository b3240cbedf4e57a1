"""Sends copies, and keeps the gradients of backward until zero_grad().

caught by: ZeRO2 · peak
"""

from solutions import zero2 as right


class Bucket(right.ShardedBucket):
    def __init__(self, *args):
        super().__init__(*args)
        self.kept = {}

    def pack(self, place):
        self.kept[place] = self.parameters[place].grad
        super().pack(place)

    def reset(self):
        super().reset()
        self.kept.clear()


class ZeRO2(right.ZeRO2):
    bucket_type = Bucket
