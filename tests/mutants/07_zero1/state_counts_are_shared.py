"""Shares one step counter tensor among all parameters.

caught by: ZeRO1 · another world size
"""

from solutions import zero1 as right


class ZeRO1(right.ZeRO1):
    def state_dict(self, to=None):
        gathered = super().state_dict(to)
        states = list((gathered or {"state": {}})["state"].values())
        for state in states:
            if "step" in state:
                state["step"] = states[0]["step"]
        return gathered
