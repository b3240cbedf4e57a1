"""Takes the embedding's weight to be on two stages, although the output layer may have its own.

caught by: Parallel3D · awkward norms
"""

from solutions import parallel_3d as right


class Parallel3D(right.Parallel3D):
    def copies_of(self, parameter):
        ends = [p for name, p in self.stage_parameters().items() if "token_embedding" in name or "output" in name]
        is_at_an_end = any(parameter is each for each in ends)
        along_pp = 2 if is_at_an_end and self.pipeline.stages > 1 else 1
        along_tp = 1 if parameter in self.sharded else self.tp_size
        along_dp = self.replicas if self.zero_stage == 0 else 1
        return along_pp * along_tp * along_dp
