"""What is missing on this rank is completed when backward has ended.

caught by: ReducesGradients · unused on one rank
"""

from solutions import zero3 as right


class ZeRO3(right.ZeRO3):
    def _leave(self, unit):
        unit.reshard()
