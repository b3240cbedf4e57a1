"""Gathers the full state from all ranks, although its group is smaller.

caught by: ZeRO3 · group
"""

from solutions import zero3 as right


class ZeRO3(right.ZeRO3):
    def full_state_dict(self):
        for flat_parameter in self.flat_parameters:
            flat_parameter.layout.group = None
        try:
            return super().full_state_dict()
        finally:
            for flat_parameter in self.flat_parameters:
                flat_parameter.layout.group = self.group
