"""Loads zeros as the master weights of a parameter that never had a gradient.

caught by: ZeRO1 · loaded masters
"""

from unittest import mock

import torch

from solutions import optimizer_state
from solutions import zero1 as right


def _shard_entry(layout, name, values, shard_entry=optimizer_state.shard_entry):
    first = next(value for value in values if value is not None)
    if name == "master":
        pairs = zip(values, layout.parameters, strict=True)
        values = [
            torch.zeros_like(parameter, dtype=first.dtype) if value is None else value for value, parameter in pairs
        ]
    return shard_entry(layout, name, values)


class ZeRO1(right.ZeRO1):
    def load_state_dict(self, state_dict):
        with mock.patch.object(optimizer_state, "shard_entry", _shard_entry):
            super().load_state_dict(state_dict)
