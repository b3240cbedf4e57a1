"""Keeps a copy of all parameters in NumPy arrays, where no tensor shows it.

caught by: ZeRO3 · memory
"""

from solutions import zero3 as right


class ZeRO3(right.ZeRO3):
    def __init__(self, module, *args, **options):
        whole = [each.detach().cpu().numpy().copy() for each in module.parameters()]
        super().__init__(module, *args, **options)
        self.whole = whole
