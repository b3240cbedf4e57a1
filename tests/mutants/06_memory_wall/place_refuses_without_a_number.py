"""Raises an error that does not say how low the peak can get.

caught by: place_checkpoints · too little memory
"""

from solutions import memory_wall as right


def place_checkpoints(saved_bytes, input_bytes, target_bytes):
    try:
        return right.place_checkpoints(saved_bytes, input_bytes, target_bytes)
    except ValueError:
        raise ValueError(f"no choice brings the peak down to {target_bytes}") from None
