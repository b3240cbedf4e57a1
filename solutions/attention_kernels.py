# Built by `make notebooks` from source/14_context_parallel/lab.py: edit that, not this.
"""Attention to some of the keys, and how partial results become one.

Shape legend: B batch, H heads, T tokens, D width of a head.
"""

import torch
from torch import Tensor


def at_least_float32(tensor: Tensor) -> Tensor:
    return tensor.to(torch.promote_types(tensor.dtype, torch.float32))


def scores_of(query: Tensor, key: Tensor, masked: bool) -> Tensor:
    """Return the scaled products of queries and keys. If masked, later keys get −∞."""
    scores = (query @ key.mT) * query.shape[-1] ** -0.5
    if masked:
        later = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).triu(1)
        scores = scores.masked_fill(later, -torch.inf)
    return scores


def attend(query: Tensor, key: Tensor, value: Tensor, masked: bool) -> tuple[Tensor, Tensor]:
    """Attend to some of the keys, as FlashAttention does.

    Returns:
        The output, and the log-sum-exp of the scores, both in float32 at least.

    Shape: all inputs [B, H, T, D]; returns [B, H, T, D] and [B, H, T, 1].
    """
    query, key, value = map(at_least_float32, (query, key, value))
    scores = scores_of(query, key, masked)
    log_sum = scores.logsumexp(-1, keepdim=True)
    return (scores - log_sum).exp() @ value, log_sum


def merge(output: Tensor, log_sum: Tensor, other_output: Tensor, other_log_sum: Tensor) -> tuple[Tensor, Tensor]:
    """Merge attention to some keys with attention to others: return the output and log-sum-exp for all of them."""
    total = torch.logaddexp(log_sum, other_log_sum)
    ours, theirs = (log_sum - total).exp(), (other_log_sum - total).exp()
    return ours * output + theirs * other_output, total


def attend_backward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    gradient: Tensor,
    log_sum: Tensor,
    delta: Tensor,
    masked: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the terms of the gradients of queries, keys and values that come from these queries and keys.

    Args:
        gradient: the gradient of the output of these queries.
        log_sum: the log-sum-exp of their scores with all keys, on all ranks.
        delta: the sum of output times gradient over a head's width, (B, H, T, 1).

    Source: Dao et al. 2022, "FlashAttention", algorithm 4.
    """
    query, key, value = map(at_least_float32, (query, key, value))
    probabilities = (scores_of(query, key, masked) - log_sum).exp()
    score_gradient = probabilities * (gradient @ value.mT - delta) * query.shape[-1] ** -0.5
    return score_gradient @ key, score_gradient.mT @ query, probabilities.mT @ gradient
