"""Takes the dtype of an entry from the first parameter's value, which may be None.

caught by: ZeRO1 · plain state
"""

from unittest import mock

from solutions import optimizer_state
from solutions import zero1 as right


def _shard_entry(layout, name, values):
    first = values[0]
    if not optimizer_state.is_per_element(name, values, layout.parameters):
        return first.clone() if hasattr(first, "clone") else first
    flat = optimizer_state.new_entry(layout, name, first.dtype)
    for view, value in zip(layout.views(flat), values, strict=True):
        if value is not None:
            view.copy_(value)
    return layout.shard_of(flat).clone()


class ZeRO1(right.ZeRO1):
    def load_state_dict(self, state_dict):
        with mock.patch.object(optimizer_state, "shard_entry", _shard_entry):
            super().load_state_dict(state_dict)
