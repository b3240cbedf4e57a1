"""Uses torch's base class to load: the settings are loaded, but nothing reads the state.

caught by: ZeRO1 · plain state
"""

import torch

from solutions import zero1 as right


class ZeRO1(right.ZeRO1):
    def load_state_dict(self, state_dict):
        torch.optim.Optimizer.load_state_dict(self, state_dict)
