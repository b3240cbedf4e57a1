"""Cheats by listing every possible peak in the error message, so the lowest is among them.

caught by: place_checkpoints · too little memory
"""

from itertools import combinations

from solutions import memory_wall as right


def place_checkpoints(saved_bytes, input_bytes, target_bytes):
    blocks = range(len(saved_bytes))
    choices = [chosen for count in range(len(blocks) + 1) for chosen in combinations(blocks, count)]
    peaks = [right.activation_peak_bytes(saved_bytes, input_bytes, chosen) for chosen in choices]
    for chosen, peak in zip(choices, peaks, strict=True):
        if peak <= target_bytes:
            return chosen
    raise ValueError(f"too few: possible are {peaks}")
