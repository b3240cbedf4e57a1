"""Forgets that a checkpointed block's activations are recomputed in backward.

caught by: place_checkpoints · fewest
"""

from itertools import combinations


def place_checkpoints(saved_bytes, input_bytes, target_bytes):
    blocks = range(len(saved_bytes))
    for count in range(len(blocks) + 1):
        for chosen in combinations(blocks, count):
            if sum(input_bytes[i] if i in chosen else saved_bytes[i] for i in blocks) <= target_bytes:
                return chosen
    raise ValueError("too little")
