"""Saves what is gathered to compute with.

caught by: ZeRO3 · whole state
"""

from solutions import zero3 as right


class ZeRO3(right.ZeRO3):
    def full_state_dict(self):
        kept = super().full_state_dict()
        few = self.parts[0].flat.dtype
        return {name: value.to(few).to(value.dtype) for name, value in kept.items()}
