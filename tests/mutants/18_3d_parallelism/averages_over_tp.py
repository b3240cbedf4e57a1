"""Averages gradients over tp, where each rank has other shards.

caught by: Parallel3D · plain replicas
"""

from solutions import parallel_3d as right


class Parallel3D(right.Parallel3D):
    def __init__(self, model, mesh, *arguments, **options):
        self.tp_group = mesh.get_group("tp")
        super().__init__(model, mesh, *arguments, **options)

    def add_data_parallelism(self, *arguments):
        own, self.dp_group = self.dp_group, self.dp_group if self.zero_stage else self.tp_group
        super().add_data_parallelism(*arguments)
        self.dp_group = own
