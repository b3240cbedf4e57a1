"""Takes every parameter with one dimension, and the positions, for replicated, even a split bias.

caught by: Parallel3D · awkward norms
"""

from solutions import parallel_3d as right


class Parallel3D(right.Parallel3D):
    def copies_of(self, parameter):
        stages = dict(self.pipeline.tied).get(parameter, [self.pipeline.stage])
        along_tp = 1 if parameter.dim() > 1 and len(parameter) != 24 else self.tp_size
        along_dp = self.replicas if self.zero_stage == 0 else 1
        return len(stages) * along_tp * along_dp
