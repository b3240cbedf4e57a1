"""Resets the step counters when loading, so Adam applies its bias correction a second time.

caught by: ZeRO1 · plain state
"""

import torch

from solutions import zero1 as right


class ZeRO1(right.ZeRO1):
    def load_state_dict(self, state_dict):
        super().load_state_dict(state_dict)
        for state in self.inner.state.values():
            if "step" in state:
                state["step"] = torch.zeros_like(state["step"])
