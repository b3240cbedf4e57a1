"""Puts a whole state together from the parts of all ranks that there are, the group's or not.

caught by: ZeRO3 · group
"""

from solutions import zero3 as right


class ZeRO3(right.ZeRO3):
    def full_state_dict(self):
        group, self.group = self.group, None
        try:
            return super().full_state_dict()
        finally:
            self.group = group
