"""Tries every choice for up to seven blocks, but chooses greedily for more.

caught by: place_checkpoints · fewest
"""

from solutions import memory_wall as right


def place_checkpoints(saved_bytes, input_bytes, target_bytes):
    def peak(chosen):
        return right.activation_peak_bytes(saved_bytes, input_bytes, chosen)

    blocks, chosen = range(len(saved_bytes)), ()
    while len(blocks) > 7 and peak(chosen) > target_bytes and len(chosen) < len(blocks):
        left = [block for block in blocks if block not in chosen]
        chosen += (min(left, key=lambda block: peak((*chosen, block))),)
    if len(blocks) > 7 and peak(chosen) <= target_bytes:
        return tuple(sorted(chosen))
    return right.place_checkpoints(saved_bytes, input_bytes, target_bytes)
