"""What is gathered stays.

caught by: ShardedParameters · memory
"""

from solutions import zero3 as right


class ShardedParameters(right.ShardedParameters):
    def free(self):
        pass
