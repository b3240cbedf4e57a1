"""Assumes that every parameter has a gradient, even frozen ones.

caught by: model_state_bytes · values
"""

import torch


def model_state_bytes(module, optimizer):
    return {
        "parameters": sum(p.nbytes for p in module.parameters()),
        "gradients": sum(p.nbytes for p in module.parameters()),
        "optimizer": sum(v.nbytes for s in optimizer.state.values() for v in s.values() if torch.is_tensor(v)),
    }
