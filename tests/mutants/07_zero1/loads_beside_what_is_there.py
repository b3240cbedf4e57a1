"""Keeps state that the checkpoint lacks: loading a checkpoint from before the first step does not reset it.

caught by: ZeRO1 · before the first step
"""

from solutions import zero1 as right


class ZeRO1(right.ZeRO1):
    def load_state_dict(self, state_dict):
        before = {shard: dict(state) for shard, state in self.inner.state.items()}
        super().load_state_dict(state_dict)
        for shard, state in before.items():
            self.inner.state[shard] = {**state, **self.inner.state[shard]}
