"""Shards the optimizer state over tp, where each rank has other parameters.

caught by: Parallel3D · ZeRO-1
"""

from solutions import parallel_3d as right


class Parallel3D(right.Parallel3D):
    def __init__(self, model, mesh, *arguments, **options):
        self.tp_group = mesh.get_group("tp")
        super().__init__(model, mesh, *arguments, **options)

    def add_data_parallelism(self, *arguments):
        own, self.dp_group = self.dp_group, self.tp_group if self.zero_stage else self.dp_group
        super().add_data_parallelism(*arguments)
        self.dp_group = own
