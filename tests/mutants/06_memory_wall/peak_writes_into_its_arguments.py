"""Replaces the entries of saved_bytes, which belongs to the caller, by what each block keeps.

caught by: activation_peak_bytes · values
"""


def activation_peak_bytes(saved_bytes, input_bytes, chosen):
    kept, recomputed = saved_bytes, [saved_bytes[i] if i in chosen else 0 for i in range(len(saved_bytes))]
    for i in chosen:
        kept[i] = input_bytes[i]
    return max(sum(kept[: k + 1]) + recomputed[k] for k in range(len(kept)))
