"""The course's formulas for memory, communication, time, pipelines and activations, each with its source.

Bytes are per rank unless a name says otherwise. Times are in seconds. The symbols are those of the literature: Ψ
parameters, N ranks, p stages, m micro-batches, v chunks, t tensor-parallel ranks, k experts per token.

Sources:
    ZeRO        Rajbhandari et al. 2020, "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models"
    FSDP        Zhao et al. 2023, "PyTorch FSDP: Experiences on Scaling Fully Sharded Data Parallel"
    Megatron-1  Shoeybi et al. 2019, arXiv 1909.08053
    Megatron-2  Narayanan et al. 2021, arXiv 2104.04473
    Megatron-3  Korthikanti et al. 2022, arXiv 2205.05198
    GPipe       Huang et al. 2019
    GShard      Lepikhin et al. 2020, arXiv 2006.16668
    Ring        Liu et al. 2023, "Ring Attention with Blockwise Transformers", arXiv 2310.01889
    Ulysses     Jacobs et al. 2023, "DeepSpeed Ulysses", arXiv 2309.14509
    nccl-tests  PERFORMANCE.md of NVIDIA's nccl-tests
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

ZERO_STAGES = (0, 1, 2, 3)  # 0 is plain data parallelism


@dataclass(frozen=True)
class BytesPerParameter:
    """The bytes that one parameter costs, by what they are used for."""

    parameter: int
    gradient: int
    optimizer: int

    @property
    def total(self) -> int:
        return self.parameter + self.gradient + self.optimizer


# ZeRO §3.1, K = 12: bf16 parameter and gradient; fp32 master weight, momentum and variance.
MIXED_ADAM = BytesPerParameter(2, 2, 12)
# The same with a second, fp32 gradient for accumulation: 2 + 6 + 12 = 20 bytes per parameter.
MIXED_ADAM_FP32_GRADIENTS = BytesPerParameter(2, 6, 12)
FP32_ADAM = BytesPerParameter(4, 4, 8)


def _positive(**values) -> None:
    """Raise ValueError if a value is not above 0."""
    for name, value in values.items():
        if value <= 0:
            raise ValueError(f"{name} must be above 0, got {value}")


def _stage(stage: int) -> None:
    if stage not in ZERO_STAGES:
        raise ValueError(f"stage must be one of {ZERO_STAGES} (0 is plain data parallelism), got {stage}")


# -- static memory


def model_state_bytes(
    parameters: float, ranks: int, stage: int, bytes_per_parameter: BytesPerParameter = MIXED_ADAM
) -> float:
    """Bytes of parameters, gradients and optimizer state on one rank. Source: ZeRO §3.1 and figure 1."""
    _positive(parameters=parameters, ranks=ranks)
    _stage(stage)
    parameter = bytes_per_parameter.parameter / (ranks if stage >= 3 else 1)
    gradient = bytes_per_parameter.gradient / (ranks if stage >= 2 else 1)
    optimizer = bytes_per_parameter.optimizer / (ranks if stage >= 1 else 1)
    return parameters * (parameter + gradient + optimizer)


def memory_saving(ranks: int, stage: int, bytes_per_parameter: BytesPerParameter = MIXED_ADAM) -> float:
    """The factor by which a stage reduces the model state of plain data parallelism. Derived from model_state_bytes."""
    plain_bytes = model_state_bytes(1, ranks, 0, bytes_per_parameter)
    return plain_bytes / model_state_bytes(1, ranks, stage, bytes_per_parameter)


def zero3_parameter_peak_bytes(
    unit_parameters: Sequence[float], ranks: int, bytes_each: int = 2, prefetch: int = 0
) -> float:
    """Bytes of parameters at ZeRO-3's peak: the rank's shards and the unsharded units.

    Args:
        prefetch: The number of units that are unsharded ahead of the one that computes.

    Source: FSDP §3.2.1 (without prefetch): Σψᵢ/N + max ψᵢ.
    """
    _positive(ranks=ranks)
    if not unit_parameters or prefetch < 0:
        raise ValueError(
            f"zero3_parameter_peak_bytes needs at least one unit and a prefetch of 0 or more, "
            f"got {len(unit_parameters)} units and prefetch={prefetch}"
        )
    window = prefetch + 1
    gathered = max(sum(unit_parameters[i : i + window]) for i in range(len(unit_parameters)))
    return bytes_each * (sum(unit_parameters) / ranks + gathered)


# -- bytes on the wire, sent per rank


def ring_fraction(ranks: int) -> float:
    """f = (N−1)/N, the fraction of a buffer that belongs to the other ranks."""
    _positive(ranks=ranks)
    return (ranks - 1) / ranks


def reduce_scatter_sent_bytes(buffer_bytes: float, ranks: int) -> float:
    """Ring reduce-scatter of a buffer of S bytes: fS. Source: nccl-tests."""
    return ring_fraction(ranks) * buffer_bytes


def all_gather_sent_bytes(buffer_bytes: float, ranks: int) -> float:
    """Ring all-gather into a buffer of S bytes: fS. Source: nccl-tests."""
    return ring_fraction(ranks) * buffer_bytes


def all_reduce_sent_bytes(buffer_bytes: float, ranks: int) -> float:
    """Ring all-reduce, which is a reduce-scatter and an all-gather: 2fS. Source: nccl-tests."""
    return reduce_scatter_sent_bytes(buffer_bytes, ranks) + all_gather_sent_bytes(buffer_bytes, ranks)


def step_sent_bytes(parameters: float, ranks: int, stage: int, bytes_each: int = 2, micro_batches: int = 1) -> float:
    """Bytes that one rank sends per optimizer step, with w bytes per element and g micro-batches.

    Plain data parallelism (with no_sync) and ZeRO-1: 2fwΨ. ZeRO-2: (g+1)fwΨ. ZeRO-3: 3g·fwΨ.

    Source: ZeRO §7 for g = 1; derived for g > 1.
    """
    _positive(parameters=parameters, micro_batches=micro_batches)
    _stage(stage)
    passes = {0: 2, 1: 2, 2: micro_batches + 1, 3: 3 * micro_batches}[stage]
    return passes * ring_fraction(ranks) * bytes_each * parameters


def tensor_parallel_sent_bytes(tokens: float, hidden: float, layers: int, ranks: int, bytes_each: int = 2) -> float:
    """Bytes that one rank sends in a step of L transformer layers: four all-reduces of sbh elements per layer.

    Forward and backward have two each. With sequence parallelism, each is a reduce-scatter and an all-gather, which
    send as many bytes. Sequence-parallel layers that gather their input again in backward send more.

    Args:
        tokens: s · b, the tokens of all sequences of the step; every rank gets all of them.

    Source: Megatron-1 §3; Megatron-3 §4.2.2 for sequence parallelism.
    """
    _positive(tokens=tokens, hidden=hidden, layers=layers)
    return 4 * layers * all_reduce_sent_bytes(bytes_each * tokens * hidden, ranks)


def ring_step_bytes(tokens: float, kv_width: float, bytes_each: int = 2) -> float:
    """Bytes of the keys and values that a rank of a ring passes on in one step: 2wnd, for one layer.

    Args:
        tokens: n, the tokens of one rank, of all its sequences.
        kv_width: d, the width of the keys: h, or less with grouped-query attention.

    Source: Ring §3.
    """
    _positive(tokens=tokens, kv_width=kv_width)
    return 2 * bytes_each * tokens * kv_width


def ring_attention_sent_bytes(
    tokens: float, kv_width: float, layers: int, ranks: int, bytes_each: int = 2, gradient_bytes: int = 4
) -> float:
    """Bytes that one rank sends in a step of L layers with ring attention over N ranks.

    Forward passes the keys and values on N−1 times. Backward does so again, and each gradient of them travels through
    all N ranks until it is home: 2(N−1) · 2wnd + N · 2gnd, with g bytes per element of such a gradient.

    Args:
        tokens: n, the tokens of one rank, of all its sequences.
        gradient_bytes: g, 4 if the terms of these gradients are added in fp32.

    Derived from Ring §3.
    """
    _positive(layers=layers, ranks=ranks)
    twice = 2 * (ranks - 1) * ring_step_bytes(tokens, kv_width, bytes_each)
    return layers * (twice + (ranks if ranks > 1 else 0) * ring_step_bytes(tokens, kv_width, gradient_bytes))


def all_to_all_attention_sent_bytes(
    tokens: float, hidden: float, kv_width: float, layers: int, ranks: int, bytes_each: int = 2
) -> float:
    """Bytes that one rank sends in a step of L layers with Ulysses over N ranks: 2L · f · w · n · (2h + 2d).

    Queries, keys, values and outputs take an all-to-all each, and so do their gradients.

    Source: Ulysses §3.2 for forward; derived for backward.
    """
    _positive(tokens=tokens, hidden=hidden, kv_width=kv_width, layers=layers)
    return 2 * layers * ring_fraction(ranks) * bytes_each * tokens * 2 * (hidden + kv_width)


def causal_imbalance(ranks: int, zigzag: bool = True) -> float:
    """What the busiest of N ranks computes for causal attention, over the mean: 1 in zigzag order, else (2N−1)/N.

    Without zigzag, the last of N equal parts of the sequence sees N−1 whole parts and half of its own, and the parts
    see N/2 on average. Derived.
    """
    _positive(ranks=ranks)
    return 1.0 if zigzag else (2 * ranks - 1) / ranks


def expert_parallel_sent_bytes(
    tokens: float, hidden: float, top_k: int, layers: int, ranks: int, bytes_each: int = 2
) -> float:
    """Bytes that one rank sends in a step of L layers of experts, if all get as many tokens: 4L · f · w · n · k · h.

    Forward dispatches each token to its k experts and combines their outputs; backward does the same with gradients.

    Args:
        tokens: n, the tokens of one rank, of all its sequences.

    Source: GShard for forward; derived for backward.
    """
    _positive(tokens=tokens, hidden=hidden, top_k=top_k, layers=layers)
    return 4 * layers * ring_fraction(ranks) * bytes_each * tokens * top_k * hidden


# -- the α–β cost model: α seconds per message, β seconds per byte


def ring_all_gather_s(buffer_bytes: float, ranks: int, alpha_s: float, beta_s: float) -> float:
    """Ring all-gather: (N−1)α + fSβ. A ring reduce-scatter takes the same time."""
    return (ranks - 1) * alpha_s + all_gather_sent_bytes(buffer_bytes, ranks) * beta_s


def ring_all_reduce_s(buffer_bytes: float, ranks: int, alpha_s: float, beta_s: float) -> float:
    """Ring all-reduce: 2(N−1)α + 2fSβ."""
    return 2 * ring_all_gather_s(buffer_bytes, ranks, alpha_s, beta_s)


def tree_all_reduce_s(buffer_bytes: float, ranks: int, alpha_s: float, beta_s: float) -> float:
    """All-reduce over a binomial tree, not pipelined: 2⌈log₂N⌉(α + Sβ)."""
    _positive(ranks=ranks)
    return 2 * math.ceil(math.log2(ranks)) * (alpha_s + buffer_bytes * beta_s)


def halving_doubling_all_reduce_s(buffer_bytes: float, ranks: int, alpha_s: float, beta_s: float) -> float:
    """All-reduce by recursive halving and doubling, if N is a power of two: 2log₂N·α + 2fSβ."""
    _positive(ranks=ranks)
    if ranks & (ranks - 1):
        raise ValueError(f"recursive halving and doubling needs a number of ranks that is a power of two, got {ranks}")
    return 2 * math.log2(ranks) * alpha_s + all_reduce_sent_bytes(buffer_bytes, ranks) * beta_s


def exposed_s(ready_s: list[float], lasts_s: list[float], backward_end_s: float) -> float:
    """Communication that backward does not hide. Each bucket starts when it is ready and the one before is complete.

    eᵢ = max(eᵢ₋₁, readyᵢ) + tᵢ; exposed = max(0, e_last − end of backward). Derived.
    """
    end_s = 0.0
    for ready, lasts in zip(ready_s, lasts_s, strict=True):
        end_s = max(end_s, ready) + lasts
    return max(0.0, end_s - backward_end_s)


# -- pipeline


def bubble_over_ideal(stages: int, micro_batches: int, chunks: int = 1) -> float:
    """Idle time over ideal time: (p−1)/(v·m), for GPipe, 1F1B (v = 1) and interleaved. Source: Megatron-2 §2.2."""
    _positive(stages=stages, micro_batches=micro_batches, chunks=chunks)
    if chunks > 1 and micro_batches % stages:
        raise ValueError(
            f"the interleaved schedule needs a number of micro-batches that is a multiple of the {stages} stages, "
            f"got {micro_batches}"
        )
    return (stages - 1) / (chunks * micro_batches)


# -- activations per transformer layer: GELU MLP of width 4h, materialized or fused attention

ATTENTION = ("materialized", "fused")


def activation_bytes(
    sequence: int,
    batch: int,
    hidden: int,
    heads: int,
    *,
    tensor_ranks: int = 1,
    sequence_parallel: bool = False,
    checkpointing: str = "none",
    attention: str = "materialized",
    dropout: bool = True,
    bytes_each: int = 2,
) -> float:
    """Bytes of activations that one layer keeps for backward: sbh(34 + 5as/h). Source: Megatron-3 §4 and table 2.

    Args:
        attention: "materialized", as in the paper, or "fused": the kernel recomputes the scores tile by tile in
            backward, so the term 5as/h disappears (Dao et al. 2022, "FlashAttention", §3.1).
        checkpointing: "none", "selective" (attention is recomputed) or "full" (only the layer's input is kept).
        dropout: Whether the layer has dropout, as in the paper. If not, there are no masks and no second copy of the
            scores. Derived.
        bytes_each: Bytes of an activation, 2 in the paper. The masks of dropout, 2sbh + as²b, have 1 byte per element
            in any precision.
    """
    _positive(sequence=sequence, batch=batch, hidden=hidden, heads=heads, tensor_ranks=tensor_ranks)
    if checkpointing not in ("none", "selective", "full"):
        raise ValueError(f"checkpointing must be 'none', 'selective' or 'full', got {checkpointing!r}")
    if attention not in ATTENTION:
        raise ValueError(f"attention must be one of {', '.join(map(repr, ATTENTION))}, got {attention!r}")
    if checkpointing == "full":
        per_element = float(bytes_each)
    else:
        keeps_scores = attention == "materialized" and checkpointing == "none"
        bytes_per_score = 2 * bytes_each + 1 if dropout else bytes_each
        scores = bytes_per_score * heads * sequence / hidden if keeps_scores else 0.0
        unsharded, sharded = 4.0 * bytes_each + 2 * dropout, 12.0 * bytes_each  # 10 and 24
        if sequence_parallel:
            unsharded, sharded = 0.0, unsharded + sharded
        per_element = unsharded + (sharded + scores) / tensor_ranks
    return sequence * batch * hidden * per_element


def expert_activation_bytes(
    tokens: float, hidden: float, ffn: float, top_k: int, *, gated: bool = False, bytes_each: int = 2
) -> float:
    """Bytes that a layer of experts keeps for backward, for n tokens: wn(h + k(3h + 2f)), or 4f with a gate.

    The router keeps its input. Each of a token's k experts keeps its input, its output, which a weight multiplies, and
    the product, which torch's index_add keeps although its gradient needs no values. In between, of width f, are both
    sides of GELU, or with a gate both sides of SiLU, the other factor and the product. Derived.
    """
    _positive(tokens=tokens, hidden=hidden, ffn=ffn, top_k=top_k)
    return bytes_each * tokens * (hidden + top_k * (3 * hidden + (4 if gated else 2) * ffn))


def logits_bytes(sequence: int, batch: int, vocabulary: int) -> float:
    """Bytes of the logits that the loss keeps, always in fp32: 4sbv. Source: Megatron-3 §4.3."""
    _positive(sequence=sequence, batch=batch, vocabulary=vocabulary)
    return 4.0 * sequence * batch * vocabulary
