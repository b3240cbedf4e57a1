"""Cheats by calling the ledger's internal functions before they are blocked.

caught by: model_state_bytes · without shared.memory
"""

from shared.memory import _roles
from shared.memory.storages import uses


def model_state_bytes(module, optimizer):
    found = dict.fromkeys(("parameters", "gradients", "optimizer"), 0)
    for use in uses(_roles(module, optimizer, None)).values():
        for component, size_bytes in use.split().items():
            if component in found:
                found[component] += size_bytes
    return found
