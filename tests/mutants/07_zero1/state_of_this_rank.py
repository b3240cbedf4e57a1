"""Saves the inner optimizer's own state: the rank's shards, numbered by flat parameter.

caught by: ZeRO1 · state
"""

from solutions import zero1 as right


class ZeRO1(right.ZeRO1):
    def state_dict(self, to=None):
        return self.inner.state_dict()
