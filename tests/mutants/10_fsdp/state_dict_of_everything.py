"""Includes the full parameters, whose memory is freed, in state_dict().

caught by: ZeRO3 · own state
"""

from solutions import zero3 as right


class ZeRO3(right.ZeRO3):
    def __init__(self, *args, **options):
        super().__init__(*args, **options)
        self._state_dict_hooks.clear()
