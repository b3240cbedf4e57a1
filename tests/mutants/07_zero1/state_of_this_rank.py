"""Saves what the inner optimizer saves: this rank's shards, numbered by shard.

caught by: ZeRO1 · state
"""

from solutions import zero1 as right


class ZeRO1(right.ZeRO1):
    def state_dict(self, to=None):
        return self.inner.state_dict()
