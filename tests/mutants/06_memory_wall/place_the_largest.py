"""Checkpoints the blocks that save the most memory first, until the target is met.

caught by: place_checkpoints · fewest
"""

from solutions import memory_wall as right


def place_checkpoints(saved_bytes, input_bytes, target_bytes):
    by_size = sorted(range(len(saved_bytes)), key=lambda block: input_bytes[block] - saved_bytes[block])
    for count in range(len(by_size) + 1):
        if right.activation_peak_bytes(saved_bytes, input_bytes, tuple(by_size[:count])) <= target_bytes:
            return tuple(by_size[:count])
    return right.place_checkpoints(saved_bytes, input_bytes, target_bytes)
