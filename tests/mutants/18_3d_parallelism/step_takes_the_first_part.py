"""Lets every replica train on the first part of the batch.

caught by: Parallel3D · plain replicas
"""

from solutions import parallel_3d as right


class Parallel3D(right.Parallel3D):
    def own_part(self, batch):
        return batch.chunk(self.replicas)[0]
