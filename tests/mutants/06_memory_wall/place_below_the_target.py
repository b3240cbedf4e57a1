"""Requires the peak to be strictly below the target.

caught by: place_checkpoints · fewest
"""

from solutions import memory_wall as right


def place_checkpoints(saved_bytes, input_bytes, target_bytes):
    return right.place_checkpoints(saved_bytes, input_bytes, target_bytes - 1)
