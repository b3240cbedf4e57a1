"""Adds the largest recomputed block to everything kept after forward, although later blocks have been freed by then.

caught by: activation_peak_bytes · values
"""


def activation_peak_bytes(saved_bytes, input_bytes, chosen):
    kept = sum(input_bytes[i] if i in chosen else saved_bytes[i] for i in range(len(saved_bytes)))
    return kept + max((saved_bytes[i] for i in chosen), default=0)
