"""Adds up a bf16 model's activations in float32, which sends twice the bytes.

caught by: parallelize · bf16
"""

from unittest import mock

from solutions import tensor_parallel as right


def in_float32(partial, group):
    precise = right.torch.promote_types(partial.dtype, right.torch.float32)
    return total_of(partial.to(precise), group).to(partial.dtype)


total_of = right.sum_over_ranks


def parallelize(model, group=None, sequence_parallel=False):
    with mock.patch.object(right, "sum_over_ranks", in_float32):
        return right.parallelize(model, group, sequence_parallel)
