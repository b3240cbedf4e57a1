"""Takes every parameter to be on all stages.

caught by: Parallel3D · plain norm
"""

from solutions import parallel_3d as right


class Parallel3D(right.Parallel3D):
    def copies_of(self, parameter):
        along_tp = 1 if parameter in self.sharded else self.tp_size
        along_dp = self.replicas if self.zero_stage == 0 else 1
        return self.pipeline.stages * along_tp * along_dp
