"""Lets every replica train on the whole batch. The results are right, but nothing is gained.

caught by: Parallel3D · wire
"""

from solutions import parallel_3d as right


class Parallel3D(right.Parallel3D):
    def own_part(self, batch):
        return batch
