"""Loads any state with the right number of elements, even that of a transposed matrix.

caught by: ZeRO1 · foreign state
"""

from solutions import zero1 as right


class ZeRO1(right.ZeRO1):
    def load_state_dict(self, state_dict):
        parameters = [parameter for group in self.param_groups for parameter in group["params"]]
        fitted = {"state": {}, "param_groups": state_dict["param_groups"]}
        for index, state in state_dict["state"].items():
            shape = parameters[index].shape if index < len(parameters) else None
            fits = {n: v.view(shape) if shape and v.numel() == shape.numel() else v for n, v in state.items()}
            fitted["state"][index] = fits
        super().load_state_dict(fitted)
