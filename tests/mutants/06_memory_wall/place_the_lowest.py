"""Checkpoints blocks in order from the first one until the target is met.

caught by: place_checkpoints · fewest
"""

from solutions import memory_wall as right


def place_checkpoints(saved_bytes, input_bytes, target_bytes):
    for count in range(len(saved_bytes) + 1):
        if right.activation_peak_bytes(saved_bytes, input_bytes, tuple(range(count))) <= target_bytes:
            return tuple(range(count))
    return right.place_checkpoints(saved_bytes, input_bytes, target_bytes)
