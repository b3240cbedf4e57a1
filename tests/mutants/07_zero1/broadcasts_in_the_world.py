"""Broadcasts to all ranks instead of its group: ranks wait forever, or receive the parameters of another group.

caught by: ZeRO1 · group
"""

import torch.distributed as dist

from solutions import zero1 as right


class ZeRO1(right.ZeRO1):
    def _flatten(self, parameters):
        for parameter in parameters:
            dist.broadcast(parameter.detach(), src=0)
        flat_parameters = [right.FlatParameter(alike, self.group) for alike in right.group_by_kind(parameters)]
        self.gradients += [right.FlatGradients(flat_parameter) for flat_parameter in flat_parameters]
        return flat_parameters
