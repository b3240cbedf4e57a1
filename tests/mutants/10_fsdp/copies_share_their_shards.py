"""Shares the shards with a deep copy, so training the copy changes the original.

caught by: ZeRO3 · copies
"""

from solutions import zero3 as right


class ZeRO3(right.ZeRO3):
    def __deepcopy__(self, memo):
        memo |= {id(each): each for each in self.shards}
        return super().__deepcopy__(memo)
