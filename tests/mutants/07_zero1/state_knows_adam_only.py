"""Saves the entries of Adam and momentum SGD by name and drops those of any other optimizer.

caught by: ZeRO1 · state
"""

from solutions import zero1 as right


class ZeRO1(right.ZeRO1):
    def state_dict(self, to=None):
        gathered = super().state_dict(to)
        known = ("step", "exp_avg", "exp_avg_sq", "max_exp_avg_sq", "momentum_buffer")
        for state in (gathered or {"state": {}})["state"].values():
            for name in [name for name in state if name not in known]:
                del state[name]
        return gathered
