"""Counts the tensors in state_dict(): tied parameters count twice, and buffers count as parameters.

caught by: model_state_bytes · values
"""

import torch


def model_state_bytes(module, optimizer):
    return {
        "parameters": sum(t.nbytes for t in module.state_dict().values()),
        "gradients": sum(p.grad.nbytes for p in module.parameters() if p.grad is not None),
        "optimizer": sum(v.nbytes for s in optimizer.state.values() for v in s.values() if torch.is_tensor(v)),
    }
