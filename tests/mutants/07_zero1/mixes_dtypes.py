"""Puts parameters of different dtypes into one flat tensor with the dtype of the first.

caught by: ZeRO1 · awkward models
"""

import torch.distributed as dist

from solutions import zero1 as right


class ZeRO1(right.ZeRO1):
    def _flatten(self, parameters):
        trainable = [parameter for parameter in parameters if parameter.requires_grad]
        for parameter in parameters:
            dist.broadcast(parameter.detach(), group=self.group, group_src=0)
            parameter.data = parameter.data.to(trainable[0].dtype)
        flat_parameter = right.FlatParameter(trainable, self.group)
        self.gradients.append(right.FlatGradients(flat_parameter))
        return [flat_parameter]
