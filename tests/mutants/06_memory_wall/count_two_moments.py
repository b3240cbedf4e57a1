"""Assumes that every optimizer is Adam after its first step.

caught by: model_state_bytes · values
"""


def model_state_bytes(module, optimizer):
    return {
        "parameters": sum(p.nbytes for p in module.parameters()),
        "gradients": sum(p.grad.nbytes for p in module.parameters() if p.grad is not None),
        "optimizer": sum(2 * p.nbytes + 4 for p in module.parameters() if p.requires_grad),
    }
