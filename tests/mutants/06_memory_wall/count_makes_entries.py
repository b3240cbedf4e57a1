"""Indexes the optimizer state with every parameter, which creates empty entries that later appear in checkpoints.

caught by: model_state_bytes · values
"""

import torch


def model_state_bytes(module, optimizer):
    states = [optimizer.state[p] for group in optimizer.param_groups for p in group["params"]]
    return {
        "parameters": sum(p.nbytes for p in module.parameters()),
        "gradients": sum(p.grad.nbytes for p in module.parameters() if p.grad is not None),
        "optimizer": sum(v.nbytes for s in states for v in s.values() if torch.is_tensor(v)),
    }
