"""Keeps a float32 copy of all parameters in NumPy arrays instead of tensors.

caught by: MasterWeights · memory
"""

from solutions import memory_wall as right


class MasterWeights(right.MasterWeights):
    def step_one(self, parameter, group):
        super().step_one(parameter, group)
        self.copies = {**getattr(self, "copies", {}), parameter: parameter.float().cpu().numpy().copy()}
