"""Puts in whatever has as many numbers: a transposed matrix's state too.

caught by: ZeRO1 · foreign state
"""

from solutions import zero1 as right


class ZeRO1(right.ZeRO1):
    def load_state_dict(self, state_dict):
        every = [p for group in self.param_groups for p in group["params"]]
        fitted = {"state": {}, "param_groups": state_dict["param_groups"]}
        for number, state in state_dict["state"].items():
            shape = every[number].shape if number < len(every) else None
            fits = {n: v.view(shape) if shape and v.numel() == shape.numel() else v for n, v in state.items()}
            fitted["state"][number] = fits
        super().load_state_dict(fitted)
