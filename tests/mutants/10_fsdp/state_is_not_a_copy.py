"""Returns the buffers themselves instead of copies, so the saved state keeps changing.

caught by: ZeRO3 · full state
"""

from solutions import zero3 as right


class ZeRO3(right.ZeRO3):
    def full_state_dict(self):
        buffers = dict(self.module.named_buffers())
        return {name: buffers.get(name, value) for name, value in super().full_state_dict().items()}
