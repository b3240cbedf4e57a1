"""Keeps a full-precision copy of all parameters in a closure, where no attribute shows it.

caught by: ZeRO3 · forward memory
"""

from solutions import zero3 as right


class ZeRO3(right.ZeRO3):
    def __init__(self, module, *args, **options):
        whole = [each.detach().clone() for each in module.parameters()]
        super().__init__(module, *args, **options)
        self.undo = lambda: whole
