"""Counts a gradient for every trainable parameter, even before backward and in unused layers.

caught by: model_state_bytes · values
"""

import torch


def model_state_bytes(module, optimizer):
    return {
        "parameters": sum(p.nbytes for p in module.parameters()),
        "gradients": sum(p.nbytes for p in module.parameters() if p.requires_grad),
        "optimizer": sum(v.nbytes for s in optimizer.state.values() for v in s.values() if torch.is_tensor(v)),
    }
