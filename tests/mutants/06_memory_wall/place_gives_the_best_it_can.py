"""Returns the best choice even if it does not meet the target, instead of raising.

caught by: place_checkpoints · too little memory
"""

from solutions import memory_wall as right


def place_checkpoints(saved_bytes, input_bytes, target_bytes):
    while True:
        try:
            return right.place_checkpoints(saved_bytes, input_bytes, target_bytes)
        except ValueError:
            target_bytes += 1
