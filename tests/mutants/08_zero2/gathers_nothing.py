"""Updates the rank's own shards but does not all-gather the other ranks' updates.

caught by: ZeRO2 · values
"""

from unittest import mock

from solutions import zero2 as right


class Alone(right.ShardedOptimizer):
    def update_parameters(self):
        self.inner.step()


class ZeRO2(right.ZeRO2):
    def __init__(self, *args, **options):
        with mock.patch.object(right, "ShardedOptimizer", Alone):
            super().__init__(*args, **options)
