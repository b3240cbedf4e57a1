"""Divides shards by tp, as if every tp rank had the same one.

caught by: Parallel3D · plain norm
"""

from solutions import parallel_3d as right


class Parallel3D(right.Parallel3D):
    def copies_of(self, parameter):
        stages = dict(self.pipeline.tied).get(parameter, [self.pipeline.stage])
        along_tp = self.tp_size
        along_dp = self.replicas if self.zero_stage == 0 else 1
        return len(stages) * along_tp * along_dp
