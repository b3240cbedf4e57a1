"""Never shards the optimizer state.

caught by: Parallel3D · memory
"""

from solutions import parallel_3d as right


class Parallel3D(right.Parallel3D):
    def add_data_parallelism(self, *arguments):
        self.zero_stage = 0
        super().add_data_parallelism(*arguments)
