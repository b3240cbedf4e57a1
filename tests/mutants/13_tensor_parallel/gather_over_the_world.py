"""Ignores the group.

caught by: gather_tokens · group
"""

from solutions import tensor_parallel as right


def gather_tokens(shard, group=None):
    return right.gather_tokens(shard)
