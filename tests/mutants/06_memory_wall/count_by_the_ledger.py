"""Cheats by calling the ledger that its result is compared with.

caught by: model_state_bytes · without shared.memory
"""

from shared import memory


def model_state_bytes(module, optimizer):
    held = memory.held(module, optimizer).by_component()
    return {name: held[name] for name in ("parameters", "gradients", "optimizer")}
