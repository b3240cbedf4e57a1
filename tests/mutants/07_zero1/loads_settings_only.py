"""Lets torch's base class load: the settings come along, and the state goes where nothing reads it.

caught by: ZeRO1 · plain state
"""

import torch

from solutions import zero1 as right


class ZeRO1(right.ZeRO1):
    def load_state_dict(self, state_dict):
        torch.optim.Optimizer.load_state_dict(self, state_dict)
