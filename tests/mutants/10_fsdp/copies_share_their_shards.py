"""A copy trains the original's shards.

caught by: ZeRO3 · copies
"""

from solutions import zero3 as right


class ZeRO3(right.ZeRO3):
    def __deepcopy__(self, memo):
        memo |= {id(each): each for each in self.shards}
        return super().__deepcopy__(memo)
