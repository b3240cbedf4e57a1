"""Counts only what is kept at the end of forward and ignores recomputed activations.

caught by: activation_peak_bytes · values
"""


def activation_peak_bytes(saved_bytes, input_bytes, chosen):
    return sum(input_bytes[i] if i in chosen else saved_bytes[i] for i in range(len(saved_bytes)))
