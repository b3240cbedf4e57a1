"""Counts gradients of trainable parameters only: a parameter frozen after a step still holds its gradient.

caught by: model_state_bytes · values
"""

import torch


def model_state_bytes(module, optimizer):
    return {
        "parameters": sum(p.nbytes for p in module.parameters()),
        "gradients": sum(p.grad.nbytes for p in module.parameters() if p.requires_grad and p.grad is not None),
        "optimizer": sum(v.nbytes for s in optimizer.state.values() for v in s.values() if torch.is_tensor(v)),
    }
