"""Chooses greedily: adds the block that lowers the peak most and never reconsiders a choice.

caught by: place_checkpoints · fewest
"""

from solutions import memory_wall as right


def place_checkpoints(saved_bytes, input_bytes, target_bytes):
    chosen, blocks = (), range(len(saved_bytes))

    def peak(choice):
        return right.activation_peak_bytes(saved_bytes, input_bytes, choice)

    lowest = peak(chosen)
    while peak(chosen) > target_bytes:
        left = [block for block in blocks if block not in chosen]
        if not left:
            raise ValueError(f"at least {lowest} bytes")
        chosen += (min(left, key=lambda block: peak((*chosen, block))),)
        lowest = min(lowest, peak(chosen))
    return tuple(sorted(chosen))
