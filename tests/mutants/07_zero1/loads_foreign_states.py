"""Silently ignores a state that does not fit.

caught by: ZeRO1 · foreign state
"""

import contextlib

from solutions import zero1 as right


class ZeRO1(right.ZeRO1):
    def load_state_dict(self, state_dict):
        with contextlib.suppress(ValueError):
            super().load_state_dict(state_dict)
