"""Averages and shards over all ranks with ZeRO-1.

caught by: Parallel3D · ZeRO-1
"""

from solutions import parallel_3d as right


class Parallel3D(right.Parallel3D):
    def add_data_parallelism(self, *arguments):
        own, self.dp_group = self.dp_group, None if self.zero_stage else self.dp_group
        super().add_data_parallelism(*arguments)
        self.dp_group = own
