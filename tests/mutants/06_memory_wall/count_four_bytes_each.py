"""Counts four bytes per element, whatever the dtype.

caught by: model_state_bytes · values
"""

import torch


def model_state_bytes(module, optimizer):
    return {
        "parameters": sum(4 * p.numel() for p in module.parameters()),
        "gradients": sum(p.grad.nbytes for p in module.parameters() if p.grad is not None),
        "optimizer": sum(v.nbytes for s in optimizer.state.values() for v in s.values() if torch.is_tensor(v)),
    }
