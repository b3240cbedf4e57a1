"""Numbers the parameters it trains, without the frozen ones among them.

caught by: ZeRO1 · state
"""

from solutions import zero1 as right


class ZeRO1(right.ZeRO1):
    def state_dict(self, to=None):
        collected = super().state_dict(to)
        if collected is not None:
            collected["state"] = dict(enumerate(collected["state"].values()))
        return collected
