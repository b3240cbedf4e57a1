"""Saves only the rank's own shard of the optimizer state.

caught by: ZeRO2 · state
"""

from solutions import zero2 as right


class ZeRO2(right.ZeRO2):
    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.optimizer.state_dict = self.optimizer.inner.state_dict
