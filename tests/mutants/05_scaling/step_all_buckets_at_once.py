"""Lets every bucket use the whole link, even while another one is in flight.

caught by: predict_step_s · values
"""

from shared.formulas import ring_all_reduce_s


def predict_step_s(buckets, compute_s, ranks, alpha_s, beta_s):
    ends_s = [ready_s + ring_all_reduce_s(size, ranks, alpha_s, beta_s) for ready_s, size in buckets]
    return max(compute_s, *ends_s)
