"""What a layout (dp × pp × tp × cp ranks, and how they train) needs: its fullest rank's memory, and a step's time.

    job = Job(SHAPES["Llama-2 70B"], sequences=1024)
    layout = TrainingLayout(dp=4, pp=1, tp=8, zero_stage=1, checkpointing="full")
    memory(job, layout).total_bytes, step_time(job, layout, cluster).total_s

The order of the ranks is fixed: tensor parallelism innermost, then context parallelism, the pipeline, and data
parallelism outermost, as in Llama 3 (§3.3.2). A group stays inside a host if it fits, and leaves it otherwise.

Context parallelism (cp) divides the tokens of each sequence. Its ranks have the same parameters, so they count as more
replicas: gradients are averaged, and the ZeRO stage shards, over dp · cp ranks. Expert parallelism (ep) needs no ranks
of its own: groups of ep replicas divide the experts among themselves, so an expert has only dp · cp / ep copies.

Memory is what `planner` counts, for the fullest of the first two stages and the last one: the model state, which the
ZeRO stage shards over dp, the units that ZeRO-3 unshards, the activations of the micro-batches in flight, one layer
that is being recomputed, and the logits. Layers are divided evenly. The first stage also has the embedding and the last
one the output, so these two get the smaller shares if the layers do not divide. A layer of experts keeps what
`formulas.expert_activation_bytes` counts, instead of an MLP of width 4h.

The time of a step is a sum:

    computing   the FLOPs of the matmuls, at a fixed fraction of the peak (Gpu.efficiency), and the activations of all
                other operations, moved activation_passes times at the bandwidth of the GPU's memory
    tensor      four all-reduces of the activations per layer and micro-batch, or six with full checkpointing
    messages    those between stages
    context     a ring of keys and values per layer and micro-batch, and of their gradients in fp32. Each step hides
                behind attention, half of which is masked. The last transfer of gradients hides behind nothing.
    experts     two all-to-alls per layer and forward, two per layer and backward, of evenly loaded experts
    bubble      (p − 1)/v micro-batches, a third of that with a zero-bubble schedule
    data        the gradients, and with ZeRO-3 the parameters

Collectives are rings with the α and bandwidth of `links`. With `overlaps`, messages between stages hide except in the
bubble, and gradients hide behind the last backward, as far as possible. Without it, both are exposed.

The model knows nothing about kernels that get slower for small matrices, NCCL's other algorithms, stragglers, data
loading, the optimizer's step, unequal routes through a network, or experts of which some get more tokens.
"""

import functools
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace

from shared import formulas, planner
from shared.planner import links, stages
from shared.planner.links import RealLink
from shared.planner.shapes import ModelShape

# The only constants that were fitted, to six published runs. `scores` repeats the fit, and tests it on the other runs.
A100_EFFICIENCY, H100_EFFICIENCY = 0.66, 0.54
ACTIVATION_PASSES = 6.5  # how often each byte of activations moves to or from the GPU's memory in a step


@dataclass(frozen=True)
class Gpu:
    """A kind of GPU. The rates are those of its data sheet, except that programs reach only a part of peak_flops."""

    name: str
    memory_bytes: float
    peak_flops: float  # dense bf16
    memory_bytes_per_s: float
    efficiency: float  # the fraction of peak_flops that matmuls reach; fitted
    activation_passes: float = ACTIVATION_PASSES

    @property
    def flops(self) -> float:
        return self.efficiency * self.peak_flops


A100 = Gpu("A100", 80e9, 312e12, 2.039e12, A100_EFFICIENCY)
H100 = Gpu("H100", 80e9, 989e12, 3.35e12, H100_EFFICIENCY)


@dataclass(frozen=True)
class Cluster:
    """Hosts of identical GPUs. Inside a host, each GPU has a link of its own. Between hosts, they share adapters."""

    hosts: int
    gpu: Gpu
    inside: RealLink
    adapter: RealLink
    adapters: int  # per host
    gpus_per_host: int = 8

    @property
    def gpus(self) -> int:
        return self.hosts * self.gpus_per_host

    @property
    def adapter_bytes_per_s(self) -> float:
        """Return the bytes per second that leave a host, through all its adapters."""
        return self.adapters * self.adapter.bus_bytes_per_s


_NVLINK_4, _NVLINK_3, _IB_400, _IB_200 = (links.REAL_LINKS[index] for index in (0, 1, 4, 5))


def a100_hosts(hosts: int, adapters: int = 8) -> Cluster:
    """Return hosts of 8 A100 with 200 Gbit/s adapters, as in NVIDIA's Selene."""
    return Cluster(hosts, A100, _NVLINK_3, _IB_200, adapters)


def h100_hosts(hosts: int, adapters: int = 8) -> Cluster:
    """Return hosts of 8 H100 with 400 Gbit/s adapters."""
    return Cluster(hosts, H100, _NVLINK_4, _IB_400, adapters)


@dataclass(frozen=True)
class Job:
    """What to train: a model, on this many sequences per step.

    Attributes:
        sequence: The length of a sequence. None means the model's own context length.
    """

    shape: ModelShape
    sequences: int
    sequence: int | None = None
    attention: str = "fused"
    precision: str = stages.DEFAULT_PRECISION

    @property
    def length(self) -> int:
        return self.sequence or self.shape.context

    @property
    def tokens(self) -> int:
        return self.sequences * self.length

    @property
    def model_flops(self) -> float:
        """The FLOPs of a step without recomputation. Attention counts as if it were not causal, as in both sources.

        Source: Narayanan et al. 2021, appendix; Chowdhery et al. 2022 (PaLM), appendix B.
        """
        forward = self.shape.layers * layer_flops(self, self.tokens) + output_flops(self, self.tokens)
        return 3 * forward


@dataclass(frozen=True)
class TrainingLayout:
    """How dp · pp · tp · cp ranks share the work, and how they train."""

    dp: int
    pp: int
    tp: int
    zero_stage: int = 0
    micro_batch: int = 1
    checkpointing: str = "selective"
    schedule: str = "1f1b"
    chunks: int = 1
    sequence_parallel: bool = True
    overlaps: bool = True
    cp: int = 1  # ranks that share each sequence
    ep: int = 1  # ranks that share the experts, of those that dp counts
    zigzag: bool = True  # the order of a shared sequence

    @property
    def ranks(self) -> int:
        return self.replicas * self.pp * self.tp

    @property
    def replicas(self) -> int:
        """How many ranks have the same parameters, except for experts."""
        return self.dp * self.cp

    def __str__(self) -> str:
        return ", ".join([self.sizes, *self.options])

    def in_lines(self) -> str:
        """Return the same in short lines for a figure."""
        return "\n".join([self.sizes, ", ".join(self.options[:2]), ", ".join(self.options[2:])])

    @property
    def sizes(self) -> str:
        context = f" × CP {self.cp}" if self.cp > 1 else ""
        return f"DP {self.dp} × PP {self.pp} × TP {self.tp}{context}" + (f", EP {self.ep}" if self.ep > 1 else "")

    @property
    def options(self) -> list[str]:
        zero = [planner.STAGES[self.zero_stage]] if self.replicas > 1 else []
        schedule = [self.schedule + (f", v = {self.chunks}" if self.chunks > 1 else "")] if self.pp > 1 else []
        return [*zero, f"micro-batch {self.micro_batch}", f"checkpointing {self.checkpointing}", *schedule]


def micro_batches(job: Job, layout: TrainingLayout) -> int:
    """Return m, the number of micro-batches of each replica.

    Raises:
        ValueError: If the layout does not divide the model or the batch. The message is one sentence.
    """
    shape, parts = job.shape, layout.dp * layout.micro_batch
    if job.sequences % parts:
        raise ValueError(f"{job.sequences} sequences cannot be divided into {parts} equal micro-batches")
    if shape.heads % layout.tp:
        raise ValueError(f"{shape.heads} heads cannot be divided among {layout.tp} ranks")
    if layout.pp * layout.chunks > shape.layers + 2 or layout.pp > shape.layers:
        chunks = f"{layout.pp * layout.chunks} chunks"
        raise ValueError(f"{shape.layers} layers, with embedding and output, cannot be divided into {chunks}")
    _check_contexts_and_experts(job, layout)
    count = job.sequences // parts
    stages.check_pipeline(layout.schedule, layout.pp, count, layout.chunks)
    return count


def _check_contexts_and_experts(job: Job, layout: TrainingLayout) -> None:
    """Raise a ValueError if ranks cannot share the sequences or the experts."""
    shape, cp, ep = job.shape, layout.cp, layout.ep
    if min(cp, ep) < 1:
        raise ValueError(f"cp and ep must be at least 1, got cp={cp} and ep={ep}")
    if cp > 1 and job.length % (2 * cp):
        raise ValueError(f"{job.length} tokens cannot be divided into two equal chunks for each of {cp} ranks")
    if cp > 1 and job.attention != "fused":
        raise ValueError(f"context parallelism needs fused attention, which keeps no scores, got {job.attention!r}")
    if ep > 1 and not shape.experts:
        raise ValueError(f"{shape.name} has no experts that {ep} ranks could divide")
    for count, what in ((shape.experts, "experts"), (layout.dp, "replicas")):
        if count % ep:
            raise ValueError(f"{count} {what} cannot be divided into groups of {ep}")


def layers_of_stage(shape: ModelShape, pp: int, stage: int) -> int:
    """Return how many layers a stage has. If they do not divide evenly, the stages in the middle have one more."""
    share, more = divmod(shape.layers, pp)
    first = (pp - more + 1) // 2
    return share + (first <= stage < first + more)


# -- memory


def memory(job: Job, layout: TrainingLayout) -> planner.Plan:
    """Plan the bytes on the fullest rank.

    Raises:
        ValueError: If the layout does not divide the model or the batch.
    """
    count = micro_batches(job, layout)
    some = {0, min(1, layout.pp - 1), layout.pp - 1}
    return max((_stage_memory(job, layout, stage, count) for stage in some), key=lambda plan: plan.total_bytes)


def stage_parameters(shape: ModelShape, layout: TrainingLayout, stage: int) -> float:
    """Count the parameters of a rank of a stage. Norms and learned positions are not divided by tensor parallelism."""
    layers, is_first, is_last = layers_of_stage(shape, layout.pp, stage), stage == 0, stage == layout.pp - 1
    own = layers * shape.layer_parameters + is_first * shape.embedding_parameters
    replicated = 2 * layers * shape.norm_parameters + is_last * shape.norm_parameters
    if is_first and shape.learned_positions:
        replicated += shape.context * shape.hidden
    if is_last:  # with a tied weight, the last stage has a copy, unless it is also the first one
        own += shape.norm_parameters
        own += shape.vocabulary * shape.hidden if layout.pp > 1 or not shape.tied else 0
    return replicated + (own - replicated) / layout.tp


def _stage_expert_parameters(shape: ModelShape, layout: TrainingLayout, stage: int) -> float:
    """Count the parameters of a rank's experts, which stage_parameters() counts as if each rank had all of them."""
    return layers_of_stage(shape, layout.pp, stage) * shape.expert_parameters / layout.tp


def _layer_bytes(job: Job, layout: TrainingLayout, how: str) -> float:
    """Bytes of activations that one layer keeps of one micro-batch with this kind of checkpointing."""
    shape, bytes_each = job.shape, planner.PRECISIONS[job.precision].compute_bytes
    size = job.length // layout.cp, layout.micro_batch, shape.hidden
    sharing = {"tensor_ranks": layout.tp, "sequence_parallel": layout.sequence_parallel and layout.tp > 1}
    kinds = {"checkpointing": how, "attention": job.attention, "bytes_each": bytes_each}
    of_layer = formulas.activation_bytes(*size, shape.heads, **sharing, **kinds)
    if not shape.experts or how == "full":
        return of_layer
    tokens = job.length // layout.cp * layout.micro_batch
    experts = formulas.expert_activation_bytes(
        tokens, shape.hidden, shape.ffn, shape.top_k, gated=shape.gated, bytes_each=bytes_each
    )
    mlp = 9 * bytes_each * tokens * shape.hidden  # its input, and both sides of GELU, of width 4h
    return of_layer + (experts - mlp) / layout.tp


def _stage_memory(job: Job, layout: TrainingLayout, stage: int, count: int) -> planner.Plan:
    shape, precision = job.shape, planner.PRECISIONS[job.precision]
    parameters, is_last = stage_parameters(shape, layout, stage), stage == layout.pp - 1
    experts = _stage_expert_parameters(shape, layout, stage)
    layer_bytes = functools.partial(_layer_bytes, job, layout)

    def held_bytes(**kind: int) -> float:
        only = formulas.BytesPerParameter(**{"parameter": 0, "gradient": 0, "optimizer": 0, **kind})
        whole = formulas.model_state_bytes(parameters - experts, layout.replicas, layout.zero_stage, only)
        if not experts:
            return whole
        copies = layout.replicas // layout.ep
        return whole + formulas.model_state_bytes(experts / layout.ep, copies, layout.zero_stage, only)

    held = stages.in_flight(layout.schedule, layout.pp, stage, count, layout.chunks)
    kept = count if layout.schedule == "gpipe" else 1
    tokens = job.length // layout.cp
    logits_bytes = is_last * kept * formulas.logits_bytes(tokens, layout.micro_batch, shape.vocabulary) / layout.tp
    activations = held * layers_of_stage(shape, layout.pp, stage) * layer_bytes(layout.checkpointing) + logits_bytes
    activations += layer_bytes("none") - layer_bytes(layout.checkpointing)  # one layer is recomputed at a time
    of_layer = shape.layer_parameters - (shape.expert_parameters - shape.expert_parameters // layout.ep)
    units = 2 * of_layer if layout.zero_stage == 3 else 0  # one computes, one is prefetched
    return planner.Plan(
        parameters=held_bytes(parameter=precision.state.parameter),
        gradients=held_bytes(gradient=precision.state.gradient),
        optimizer=held_bytes(optimizer=precision.state.optimizer),
        gathered=precision.compute_bytes * units / layout.tp * (layout.replicas > 1),
        activations=activations,
    )


# -- time


@dataclass(frozen=True)
class StepTime:
    """The seconds of a step, by what a rank of the slowest stage spends them on."""

    computing_s: float
    tensor_s: float
    messages_s: float
    bubble_s: float
    data_s: float
    context_s: float = 0.0
    experts_s: float = 0.0

    @property
    def total_s(self) -> float:
        return sum(asdict(self).values())

    def by_part(self) -> dict[str, float]:
        """Return the seconds of each part, by the name that a sentence uses for it. Unused axes have no part."""
        shared = {"context parallelism's ring": self.context_s, "the experts' all-to-alls": self.experts_s}
        return {
            "computing": self.computing_s,
            "tensor parallelism's all-reduces": self.tensor_s,
            "messages between stages": self.messages_s,
            "the bubble": self.bubble_s,
            "exposed communication of data parallelism": self.data_s,
            **{part: lasts_s for part, lasts_s in shared.items() if lasts_s},
        }


def layer_flops(job: Job, tokens: float) -> float:
    """FLOPs of a layer's forward: two per parameter of a matrix and token, and those of attention."""
    matrices = job.shape.attention_parameters + job.shape.active_mlp_parameters
    return 2 * tokens * matrices + attention_flops(job, tokens)


def attention_flops(job: Job, tokens: float) -> float:
    """FLOPs of multiplying queries by keys and scores by values: 4s²bh."""
    return 4 * tokens * job.length * job.shape.hidden


def output_flops(job: Job, tokens: float) -> float:
    return 2 * tokens * job.shape.hidden * job.shape.vocabulary


def bubble_s(busy_s: Sequence[float], message_s: float, layout: TrainingLayout) -> float:
    """Estimate how long the slowest stage of a pipeline waits in a step, while the pipeline fills and drains.

    Args:
        busy_s: The seconds that each stage is busy with one micro-batch, forward and backward.
        message_s: The exposed seconds of one micro-batch's messages between two neighboring stages.
    """
    part = {"interleaved": 1 / layout.chunks, "zero_bubble": 1 / 3}.get(layout.schedule, 1)
    return part * (sum(busy_s) - max(busy_s) + (layout.pp - 1) * message_s)


Bubble = Callable[[Sequence[float], float, TrainingLayout], float]


def step_time(job: Job, layout: TrainingLayout, cluster: Cluster, bubble: Bubble = bubble_s) -> StepTime:
    """Estimate the time of a step. The module's docstring says what is in it.

    Args:
        bubble: Estimates the bubble's seconds, as bubble_s() does. Students of lab 18 pass their own.

    Raises:
        ValueError: If the layout does not divide the model or the batch, or does not use all GPUs of the cluster.
    """
    if layout.ranks != cluster.gpus:
        raise ValueError(f"the layout has {layout.ranks} ranks, and the cluster {cluster.gpus} GPUs")
    count, pp = micro_batches(job, layout), layout.pp
    computing = [_stage_computing_s(job, layout, stage, cluster.gpu) for stage in range(pp)]
    tensor = [_stage_tensor_s(job, layout, stage, cluster) for stage in range(pp)]
    context = [_stage_context_s(job, layout, stage, cluster) for stage in range(pp)]
    experts = [_stage_experts_s(job, layout, stage, cluster) for stage in range(pp)]
    message_s = _messages_s(job, layout, cluster)
    parts = zip(computing, tensor, context, experts, strict=True)
    busy = [sum(each) + message_s * (not layout.overlaps) for each in parts]
    slowest = max(range(pp), key=busy.__getitem__)
    return StepTime(
        computing_s=count * computing[slowest],
        tensor_s=count * tensor[slowest],
        messages_s=count * message_s * (not layout.overlaps),
        bubble_s=bubble(busy, message_s * layout.overlaps, layout),
        data_s=_data_s(job, layout, cluster, count, busy[slowest]),
        context_s=count * context[slowest],
        experts_s=count * experts[slowest],
    )


def _stage_computing_s(job: Job, layout: TrainingLayout, stage: int, gpu: Gpu) -> float:
    """Estimate how long a stage computes for one micro-batch, forward and backward."""
    shape, tokens = job.shape, layout.micro_batch * job.length / layout.cp
    masked_flops = (formulas.causal_imbalance(layout.cp, layout.zigzag) - 1) * attention_flops(job, tokens)
    forward_flops = layer_flops(job, tokens) + masked_flops
    recomputed = {"none": 0.0, "selective": 0.0, "full": forward_flops}[layout.checkpointing]
    if layout.checkpointing == "selective" and job.attention == "materialized":
        recomputed = attention_flops(job, tokens)
    flops = layers_of_stage(shape, layout.pp, stage) * (3 * forward_flops + recomputed)
    flops += 3 * output_flops(job, tokens) * (stage == layout.pp - 1)
    moved_bytes = _layer_bytes(replace(job, precision=stages.DEFAULT_PRECISION), layout, "none")
    passes = gpu.activation_passes * (4 / 3 if layout.checkpointing == "full" else 1)
    moving_s = layers_of_stage(shape, layout.pp, stage) * passes * moved_bytes / gpu.memory_bytes_per_s
    return flops / layout.tp / gpu.flops + moving_s


def _stage_tensor_s(job: Job, layout: TrainingLayout, stage: int, cluster: Cluster) -> float:
    """Estimate the all-reduces of one micro-batch: two per layer and forward, two per layer and backward."""
    per_layer = 6 if layout.checkpointing == "full" else 4
    nbytes = 2 * layout.micro_batch * job.length / layout.cp * job.shape.hidden
    link = _ring_link(layout.tp, _on_host(layout.tp, 1, cluster), cluster)
    one_s = formulas.ring_all_reduce_s(nbytes, layout.tp, *link)
    return per_layer * layers_of_stage(job.shape, layout.pp, stage) * one_s


def _stage_context_s(job: Job, layout: TrainingLayout, stage: int, cluster: Cluster) -> float:
    """Estimate what the rings of one micro-batch take, beyond the attention that hides them."""
    shape, ranks = job.shape, layout.cp
    if ranks == 1:
        return 0.0
    tokens = layout.micro_batch * job.length / ranks
    alpha_s, beta_s = _ring_link(ranks, _on_host(ranks, layout.tp, cluster), cluster)
    width = shape.hidden // shape.heads * max(shape.kv_heads / layout.tp, 1)
    nbytes = formulas.ring_step_bytes(tokens, width)
    gradient_bytes = formulas.ring_step_bytes(tokens, width, bytes_each=4)
    visible_flops = attention_flops(job, tokens) / ranks / 2  # of the keys of one rank
    computes_s = layout.overlaps * visible_flops / layout.tp / cluster.gpu.flops
    forward_s = max(0.0, alpha_s + nbytes * beta_s - computes_s)
    backward_s = max(0.0, 2 * alpha_s + (nbytes + gradient_bytes) * beta_s - 2 * computes_s)
    forwards = 2 if layout.checkpointing == "full" else 1
    per_layer_s = (ranks - 1) * (forwards * forward_s + backward_s) + alpha_s + gradient_bytes * beta_s
    return layers_of_stage(shape, layout.pp, stage) * per_layer_s


def _stage_experts_s(job: Job, layout: TrainingLayout, stage: int, cluster: Cluster) -> float:
    """Estimate the all-to-alls of one micro-batch. Each rank of a TP group sends a part of the tokens."""
    shape, ranks = job.shape, layout.ep
    if ranks == 1:
        return 0.0
    tokens = layout.micro_batch * job.length / layout.cp / layout.tp
    sizes = tokens, shape.hidden, shape.top_k, layers_of_stage(shape, layout.pp, stage)
    calls = 6 if layout.checkpointing == "full" else 4  # per layer
    sent_bytes = calls / 4 * formulas.expert_parallel_sent_bytes(*sizes, ranks)
    on_host = _on_host(ranks, layout.tp * layout.cp * layout.pp, cluster)
    to_other_hosts = (ranks - on_host) / (ranks - 1)
    outside_s = sent_bytes * to_other_hosts * cluster.gpus_per_host / cluster.adapter_bytes_per_s
    inside_s = sent_bytes * (1 - to_other_hosts) / cluster.inside.bus_bytes_per_s
    alpha_s = (cluster.adapter if on_host < ranks else cluster.inside).alpha_s
    return calls * sizes[-1] * (ranks - 1) * alpha_s + max(outside_s, inside_s)


def _on_host(ranks: int, stride: int, cluster: Cluster) -> int:
    """Return how many ranks of a group, which are `stride` apart, share a host."""
    return min(ranks, max(1, cluster.gpus_per_host // stride))


def _ring_link(ranks: int, on_host: int, cluster: Cluster) -> tuple[float, float]:
    """Return α and β of a ring of which so many ranks are on each host. The rings of a host share its adapters."""
    if on_host == ranks:
        return cluster.inside.alpha_s, cluster.inside.beta_s_per_byte
    own_bytes_per_s = cluster.adapter_bytes_per_s * on_host / cluster.gpus_per_host
    slowest = min(own_bytes_per_s, cluster.inside.bus_bytes_per_s)
    return (cluster.adapter.alpha_s + (on_host - 1) * cluster.inside.alpha_s) / on_host, 1 / slowest


def _messages_s(job: Job, layout: TrainingLayout, cluster: Cluster) -> float:
    """Estimate one micro-batch's messages: an output and a gradient per chunk. Each rank of a TP group sends a part."""
    if layout.pp == 1:
        return 0.0
    nbytes = 2 * layout.micro_batch * job.length / layout.cp * job.shape.hidden / layout.tp
    if layout.tp * layout.cp * layout.pp <= cluster.gpus_per_host:
        alpha_s, bytes_per_s = cluster.inside.alpha_s, cluster.inside.bus_bytes_per_s
    else:
        alpha_s, bytes_per_s = cluster.adapter.alpha_s, cluster.adapter_bytes_per_s / cluster.gpus_per_host
    return 2 * layout.chunks * (alpha_s + nbytes / bytes_per_s)


def _data_s(job: Job, layout: TrainingLayout, cluster: Cluster, count: int, micro_batch_s: float) -> float:
    """Estimate the exposed communication of data parallelism, which runs over dp replicas of cp ranks each."""
    if layout.replicas == 1:
        return 0.0
    units = layers_of_stage(job.shape, layout.pp, layout.pp // 2) if layout.zero_stage == 3 else 1

    def whole_s(parameters: float, folded: int) -> float:
        """Estimate the all-reduces of these parameters, of which one in `folded` replicas has a copy."""
        replicas, stride = layout.dp // folded, layout.tp * layout.cp * layout.pp * folded
        on_host = _on_host(layout.cp, layout.tp, cluster) * _on_host(replicas, stride, cluster)
        ranks = replicas * layout.cp
        nbytes = planner.PRECISIONS[job.precision].compute_bytes * parameters
        return units * formulas.ring_all_reduce_s(nbytes / units, ranks, *_ring_link(ranks, on_host, cluster))

    ends = {0, layout.pp - 1}
    experts = max(_stage_expert_parameters(job.shape, layout, stage) for stage in ends)
    all_reduce_s = whole_s(max(stage_parameters(job.shape, layout, stage) for stage in ends) - experts, 1)
    if experts:
        all_reduce_s += whole_s(experts / layout.ep, layout.ep)
    # Stages 0 and 1 communicate once per step, stage 2 half as much after each backward and half of it once, stage 3
    # one and a half times as much in each micro-batch.
    per_micro_batch_s = {2: 0.5, 3: 1.5}.get(layout.zero_stage, 0.0) * all_reduce_s
    once_s = {2: 0.5, 3: 0.0}.get(layout.zero_stage, 1.0) * all_reduce_s
    if not layout.overlaps:
        return count * per_micro_batch_s + once_s
    hides_s = micro_batch_s if layout.zero_stage == 3 else micro_batch_s * 2 / 3  # all of it, or its backward
    left_s = max(0.0, per_micro_batch_s - hides_s)
    return count * left_s + max(0.0, once_s - hides_s * (layout.zero_stage < 2))


def mfu(job: Job, total_s: float, cluster: Cluster) -> float:
    """Return the model FLOPs utilization of a step that takes so long."""
    return job.model_flops / (total_s * cluster.gpus * cluster.gpu.peak_flops)
