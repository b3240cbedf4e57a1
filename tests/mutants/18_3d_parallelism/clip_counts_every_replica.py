"""Counts the gradients of all replicas, which are equal.

caught by: Parallel3D · plain norm
"""

from solutions import parallel_3d as right


class Parallel3D(right.Parallel3D):
    def copies_of(self, parameter):
        stages = dict(self.pipeline.tied).get(parameter, [self.pipeline.stage])
        along_tp = 1 if parameter in self.sharded else self.tp_size
        return len(stages) * along_tp
