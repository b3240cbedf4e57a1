"""Checkpoints every block if that meets the target, instead of as few blocks as possible.

caught by: place_checkpoints · fewest
"""

from solutions import memory_wall as right


def place_checkpoints(saved_bytes, input_bytes, target_bytes):
    every = tuple(range(len(saved_bytes)))
    if right.activation_peak_bytes(saved_bytes, input_bytes, every) <= target_bytes:
        return every
    return right.place_checkpoints(saved_bytes, input_bytes, target_bytes)
