"""Saves the optimizer state but does not load it.

caught by: ZeRO2 · state
"""

from unittest import mock

from solutions import zero2 as right


class Anew(right.ShardedOptimizer):
    def load_state_dict(self, state_dict):
        pass


class ZeRO2(right.ZeRO2):
    def __init__(self, *args, **options):
        with mock.patch.object(right, "ShardedOptimizer", Anew):
            super().__init__(*args, **options)
