"""Uses the caller's tensors without copying them, so the checkpoint changes with every step.

caught by: ZeRO1 · plain state
"""

from solutions import zero1 as right


class ZeRO1(right.ZeRO1):
    def load_state_dict(self, state_dict):
        super().load_state_dict(state_dict)
        for state in state_dict["state"].values():
            for held in self.inner.state.values():
                if "step" in state and "step" in held:
                    held["step"] = state["step"]
