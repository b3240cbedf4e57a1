"""Tries every choice of up to three blocks, then extends the best one greedily.

caught by: place_checkpoints · fewest
"""

from itertools import combinations

from solutions import memory_wall as right


def place_checkpoints(saved_bytes, input_bytes, target_bytes):
    def peak(chosen):
        return right.activation_peak_bytes(saved_bytes, input_bytes, chosen)

    blocks, best = range(len(saved_bytes)), ()
    for count in range(min(3, len(blocks)) + 1):
        best = min(combinations(blocks, count), key=peak)
        if peak(best) <= target_bytes:
            return best
    while len(best) < len(blocks):
        best = min(((*best, block) for block in blocks if block not in best), key=peak)
        if peak(best) <= target_bytes:
            return tuple(sorted(best))
    return right.place_checkpoints(saved_bytes, input_bytes, target_bytes)
