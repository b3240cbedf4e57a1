"""Waits for the all-gather in unshard(), so nothing could compute in the meantime.

caught by: ShardedFlatParameter · plain parameters
"""

from solutions import units as right


class ShardedFlatParameter(right.ShardedFlatParameter):
    def unshard(self):
        handle = super().unshard()
        handle.wait()
        return handle
