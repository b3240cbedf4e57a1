"""Takes the start of backward as the peak.

caught by: activation_peak_bytes · values
"""


def activation_peak_bytes(saved_bytes, input_bytes, chosen):
    kept = sum(input_bytes[i] if i in chosen else saved_bytes[i] for i in range(len(saved_bytes)))
    return kept + (saved_bytes[-1] if len(saved_bytes) - 1 in chosen else 0)
