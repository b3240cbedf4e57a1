"""Reports the peak with all blocks checkpointed, which is not the lowest possible peak.

caught by: place_checkpoints · too little memory
"""

from solutions import memory_wall as right


def place_checkpoints(saved_bytes, input_bytes, target_bytes):
    try:
        return right.place_checkpoints(saved_bytes, input_bytes, target_bytes)
    except ValueError:
        every = tuple(range(len(saved_bytes)))
        lowest = right.activation_peak_bytes(saved_bytes, input_bytes, every)
        raise ValueError(f"the peak can get as low as {lowest}") from None
