"""Adds the largest block that comes back to all that is kept, though what lay above it is gone.

caught by: activation_peak_bytes · values
"""


def activation_peak_bytes(saved_bytes, input_bytes, chosen):
    kept = sum(input_bytes[i] if i in chosen else saved_bytes[i] for i in range(len(saved_bytes)))
    return kept + max((saved_bytes[i] for i in chosen), default=0)
