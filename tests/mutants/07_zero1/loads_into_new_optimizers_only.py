"""Loads only where there is no state yet, so an optimizer that has stepped keeps its own.

caught by: ZeRO1 · plain state
"""

from solutions import zero1 as right


class ZeRO1(right.ZeRO1):
    def load_state_dict(self, state_dict):
        before = {shard: dict(state) for shard, state in self.inner.state.items() if state}
        super().load_state_dict(state_dict)
        self.inner.state.update(before)
