"""Offloads activations to memory that is not counted, and recomputes nothing.

caught by: Checkpointed · twice
"""

import torch

from solutions import memory_wall as right


class Checkpointed(right.Checkpointed):
    def forward(self, *inputs):
        own = {id(tensor) for tensor in (*inputs, *self.module.parameters())}

        def away(tensor):
            if id(tensor) in own or tensor.is_leaf:
                return tensor
            return tensor.detach().cpu().numpy().tobytes(), tensor.dtype, tensor.shape, tensor.stride(), tensor.device

        def back(saved):
            if isinstance(saved, torch.Tensor):
                return saved
            memory, dtype, shape, stride, device = saved
            flat = torch.frombuffer(bytearray(memory), dtype=dtype).view(shape)
            return torch.empty_strided(shape, stride, dtype=dtype).copy_(flat).to(device)

        with torch.autograd.graph.saved_tensors_hooks(away, back):
            return self.module(*inputs)
