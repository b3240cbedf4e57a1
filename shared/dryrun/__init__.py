"""Run one training step of a published model as if on a cluster, in one process and without allocating its tensors.

    python -m shared.dryrun --strategy zero3 --model llama-70b --world-size 1024

The strategies are those that train on real ranks, unchanged. They come from a registry, a module that is named at run
time. The model is on `meta`, where tensors have shapes but no memory. The process group is torch's fake one, whose
collectives return at once, so any rank can go through a whole step alone. Bytes and collectives are counted as on real
ranks (see `shared/memory` and `shared/wire`). Nothing is timed, and no value is computed.

Training is in mixed precision, with 16 bytes of state per parameter. Below ZeRO-3 these are bf16 parameters and
gradients and fp32 optimizer state with master weights (2 + 2 + 12). ZeRO-3 has fp32 shards that it unshards as bf16
(4 + 4 + 8).

Tensor parallelism splits the layers over all ranks, so that the world size is its N:

    python -m shared.dryrun --strategy tp+sp --model llama-70b --world-size 8

Pipeline parallelism splits the model by depth. Each rank is a stage, and a step has a batch of eight micro-batches:

    python -m shared.dryrun --strategy pp --model llama-70b --world-size 16 --rank 0

Context parallelism divides each sequence among all ranks. Expert parallelism divides the experts of a model that has
some, and every rank gets a batch of its own. On `meta`, a router computes no values, so all experts get as many tokens:

    python -m shared.dryrun --strategy cp --model llama-3-8b --world-size 8 --sequence 8192
    python -m shared.dryrun --strategy ep --model mixtral-8x7b --world-size 8

--schedule and --micro-batches choose another schedule than 1F1B, and another number of micro-batches than eight.
"""

import argparse
import contextlib
import dataclasses
import importlib
import resource
import time
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from shared import formulas, memory, tables, wire
from shared.dryrun.decoder import MLP, Decoder, balanced_routing
from shared.memory import Held, Sample, storages
from shared.planner.shapes import MIXTRAL, SHAPES, ModelShape
from shared.planner.stages import stage_parameters

GB = 1e9
WRAPPERS = "solutions"  # the package whose strategies run, unless another is named
MODELS = {name.lower().replace(" ", "-"): shape for name, shape in SHAPES.items()}
MODELS |= {"llama-70b": SHAPES["Llama-2 70B"], "mixtral-8x7b": MIXTRAL}


@dataclass(frozen=True)
class DryRun:
    """What one rank would hold and send in one step of one micro-batch, or of a pipeline's whole batch."""

    shape: ModelShape
    strategy: str
    stage: int
    rank: int
    world_size: int
    samples: list[Sample]
    own_parameters_bytes: int
    messages: int
    sent_bytes: float
    tokens: int
    recompute: bool
    splits_layers: bool
    is_pipelined: bool
    chunks: int  # of a pipeline's stage

    @property
    def at_peak(self) -> Held:
        return max((sample.held for sample in self.samples), key=lambda held: held.total_bytes)

    def most_bytes(self, component: str) -> int:
        """Return the most bytes that a component holds at any time. Components reach their peaks at different times."""
        return max(sample.held.by_component()[component] for sample in self.samples)

    @property
    def gathered_bytes(self) -> int:
        """The most bytes of unsharded parameters, beyond this rank's own shard."""
        return self.most_bytes("parameters") - self.own_parameters_bytes

    @property
    def padding_elements(self) -> int:
        """The elements of padding in ZeRO-3's fp32 shards, over all ranks. It makes all shards of a unit equally long.

        This is all that differs between ranks: the padding is at the end of each unit, so the last ranks have it.
        """
        return self.own_parameters_bytes * self.world_size // 4 - self.shape.parameters


# -- strategies


def strategies(package: str = WRAPPERS) -> dict[str, Any]:
    """Return the strategies that can run on `meta`, by name. These are the course's own.

    Those of torch and DeepSpeed read values, so their names select the course's counterparts instead. A pipeline on a
    mesh needs sizes that a dry run does not know.

    Args:
        package: A package with a registry: a module `strategies` with STRATEGIES and mixed_precision().
    """
    registered = _registry(package).STRATEGIES.values()
    ours = {each.name: each for each in registered if each.provider == "course" and not _has_several_axes(each)}
    return ours | {strategy.counterpart: strategy for strategy in ours.values() if strategy.counterpart}


def _has_several_axes(strategy) -> bool:
    return "mesh" in getattr(strategy, "supports", ()) and getattr(strategy, "is_pipelined", False)


def _registry(package: str):
    return importlib.import_module(f"{package}.strategies")


# -- the run


def dry_run(
    shape: ModelShape,
    strategy: str,
    world_size: int,
    micro_batch: int = 1,
    sequence: int = 2048,
    recompute: bool = True,
    package: str = WRAPPERS,
    rank: int = 0,
    **pipeline: object,
) -> DryRun:
    """Take two steps on meta as one rank of world_size, and count during the second.

    Args:
        pipeline: Options for a pipeline, such as schedule="gpipe" and micro_batches=16. Other strategies ignore them.

    Raises:
        KeyError: If the registry does not have the strategy.
        RuntimeError: If this process already has a process group, or the strategy cannot be built here.
        ValueError: If the ranks cannot share what the strategy divides among them.
    """
    if dist.is_initialized():
        raise RuntimeError("A dry run needs a new process, because this process already has a process group.")

    chosen = strategies(package)[strategy]
    if getattr(chosen, "shards_experts", False) and not shape.experts:
        raise ValueError(f"{shape.name} has no experts that strategy {chosen.name} could shard")
    dtype, options = _registry(package).mixed_precision(chosen, torch.optim.AdamW)
    options = dataclasses.replace(options, **pipeline)
    join_fake_group(rank, world_size)
    try:
        with torch.device("meta"):
            module = Decoder(shape, recompute, experts_of(package) if shape.experts else MLP).to(dtype)
            is_pipelined = getattr(chosen, "is_pipelined", False)
            sequences = micro_batch * (options.micro_batches if is_pipelined else 1)
            tokens = torch.zeros(sequences, min(sequence, shape.context), dtype=torch.long)
            activation = torch.zeros(micro_batch, tokens.shape[1], shape.hidden, dtype=dtype)
        model, optimizer = chosen.build(module, options)
        if is_pipelined:
            announce(model.pipeline, tokens, activation)
        with balanced_routing() if shape.experts else contextlib.nullcontext():
            take_step(model, optimizer, tokens)
            with storages.counting_meta():
                own_bytes = memory.held(model, optimizer).parameters_bytes
                with wire.ledger() as log, memory.peak(model, optimizer) as peak:
                    take_step(model, optimizer, tokens)
        setting = (shape, chosen.name, chosen.stage, rank, world_size)
        counted = (peak.samples, own_bytes, log.messages, log.sent_bytes)
        splits_layers = getattr(chosen, "splits_layers", False)
        chunks = len(model.pipeline.chunks) if is_pipelined else 1
        return DryRun(*setting, *counted, tokens.numel(), recompute, splits_layers, is_pipelined, chunks)
    finally:
        dist.destroy_process_group()


def experts_of(package: str):
    """Return a function that builds a layer of experts, each of which is an MLP of a decoder."""

    def build(shape: ModelShape) -> nn.Module:
        layer = importlib.import_module(f"{package}.expert_parallel").MoE
        moe = layer(shape.hidden, 1, shape.experts, shape.top_k)
        moe.experts = nn.ModuleList(MLP(shape) for _ in range(shape.experts))
        return moe

    return build


def join_fake_group(rank: int, world_size: int) -> None:
    """Form a process group whose operations return at once. torch's fake backend knows CPUs, but not `meta`."""
    # torch 2.14 has no stub for it.
    from torch.testing._internal.distributed.fake_pg import FakeStore  # pyright: ignore[reportAttributeAccessIssue]

    dist.init_process_group("fake", rank=rank, world_size=world_size, store=FakeStore())
    world = dist.distributed_c10d._get_default_group()
    fake = world._get_backend(torch.device("cpu"))
    world._register_backend(torch.device("meta"), dist.ProcessGroup.BackendType.CUSTOM, fake)


def announce(pipeline, tokens: torch.Tensor, activation: torch.Tensor) -> None:
    """Tell a pipeline what its neighbors will send, because a message on `meta` cannot say so."""
    pipeline.announcements.begin_step(tokens)
    pipeline.announcements.assume(len(pipeline.chunks), activation)


def take_step(model, optimizer, tokens: torch.Tensor) -> None:
    optimizer.zero_grad()
    if hasattr(model, "pipeline"):
        model.step(tokens, tokens)
    else:
        model(tokens, tokens).backward()
        getattr(model, "finish_gradient_sync", lambda: None)()
    optimizer.step()


# -- comparison with the formulas


def table(run: DryRun) -> tables.Table:
    """Return a table of the counted bytes beside those of the formulas."""
    per_parameter = formulas.BytesPerParameter(4, 4, 8) if run.stage == 3 else formulas.MIXED_ADAM

    def state_bytes(**kind: int) -> float:
        only = formulas.BytesPerParameter(**{"parameter": 0, "gradient": 0, "optimizer": 0, **kind})
        if run.is_pipelined:
            return sum(kind.values()) * stage_parameters(run.shape, run.world_size, run.rank, run.chunks)
        if run.strategy == "ep":
            return sum(kind.values()) * expected_expert_parameters(run.shape, run.world_size)
        if run.splits_layers and run.strategy != "cp":
            return sum(kind.values()) * expected_split_parameters(run.shape, run.world_size)
        return formulas.model_state_bytes(run.shape.parameters, run.world_size, run.stage, only)

    expected = {
        "parameters": state_bytes(parameter=per_parameter.parameter),
        "gradients": state_bytes(gradient=per_parameter.gradient),
        "optimizer": state_bytes(optimizer=per_parameter.optimizer),
    }
    rows = []
    for name, at_peak in run.at_peak.by_component().items():
        unsharded_bytes = run.gathered_bytes if name == "parameters" else 0
        if most := run.most_bytes(name) - unsharded_bytes:
            rows.append([name, _gb(most), _gb(at_peak), _gb(expected[name]) if name in expected else ""])
    if run.stage == 3:
        rows.insert(1, ["  unsharded", _gb(run.gathered_bytes), "(above)", _gb(expected_gathered_bytes(run.shape))])
    rows.append(["total", "", _gb(run.at_peak.total_bytes), ""])
    sent = formulas.step_sent_bytes(run.shape.parameters, run.world_size, run.stage, bytes_each=2)
    if run.is_pipelined:
        sent = expected_stage_sent_bytes(run)
    elif run.strategy == "cp":
        sent = expected_context_sent_bytes(run)
    elif run.strategy == "ep":
        sent = expected_expert_sent_bytes(run)
    elif run.splits_layers:
        sent = expected_split_sent_bytes(run)
    rows.append(["sent per step", _gb(run.sent_bytes), "", _gb(sent)])
    note = f"{run.shape.name} ({run.shape.parameters / 1e9:,.1f}B), {run.strategy}, "
    note += f"rank {run.rank:,} of {run.world_size:,}; {run.messages:,} messages"
    if run.stage == 3:
        note += (
            f". Every rank holds and sends as much; {run.padding_elements:,} elements of the last ranks are padding."
        )
    return tables.Table(["GB", "maximum", "at the peak", "formula"], rows, note)


def expected_gathered_bytes(shape: ModelShape) -> float:
    """Bytes of the root unit, which stays unsharded, and two layers: the current and the next. Source: FSDP §3.2.1."""
    root = shape.embedding_parameters + shape.output_parameters
    return 2 * (root + 2 * shape.layer_parameters)


def _replicated_parameters(shape: ModelShape) -> int:
    """Return how many parameters every rank has if a decoder's layers are split: norms, positions and some biases."""
    norms = (2 * shape.layers + 1) * shape.hidden * (2 if shape.biases else 1)
    biases = 2 * shape.layers * shape.hidden if shape.biases else 0  # of the layers that are split by rows
    return norms + biases + (shape.context * shape.hidden if shape.learned_positions else 0)


def expected_split_parameters(shape: ModelShape, ranks: int) -> float:
    """Return how many parameters a rank has if a decoder's layers are split, without padding of the vocabulary."""
    replicated = _replicated_parameters(shape)
    return replicated + (shape.parameters - replicated) / ranks


def expected_split_sent_bytes(run: DryRun) -> float:
    """Bytes that a rank sends if a decoder's layers are split. Source: Megatron-LM (1909.08053), §3.

    A layer all-reduces its activations twice in forward and twice in backward. Recomputation repeats forward up to the
    last matrix of the layer. With sequence parallelism, each all-reduce is a reduce-scatter and an all-gather, and the
    gradients of replicated parameters are all-reduced.
    """
    by_tokens = run.strategy.endswith("+sp")
    again = (1.5 if by_tokens else 1) * run.recompute
    times = run.shape.layers * (4 + again) + 2  # and once each for the embedding and the output layer
    loss = formulas.all_reduce_sent_bytes(3 * 4 * run.tokens, run.world_size)
    gradients = formulas.all_reduce_sent_bytes(2 * _replicated_parameters(run.shape) * by_tokens, run.world_size)
    return times * formulas.all_reduce_sent_bytes(2 * run.tokens * run.shape.hidden, run.world_size) + loss + gradients


def expected_context_sent_bytes(run: DryRun) -> float:
    """Bytes that a rank sends if all share each sequence: rings, the loss, and all gradients.

    Recomputation repeats the ring of forward. Our ring has as many heads of keys and values as of queries.
    """
    shape, size = run.shape, run.world_size
    sizes = run.tokens / size, shape.hidden
    rings = formulas.ring_attention_sent_bytes(*sizes, shape.layers, size)
    again = run.recompute * shape.layers * (size - 1) * formulas.ring_step_bytes(*sizes)
    return rings + again + formulas.all_reduce_sent_bytes(4 + 2 * shape.parameters, size)


def expected_expert_parameters(shape: ModelShape, ranks: int) -> float:
    """Return how many parameters a rank has if the ranks divide the experts among themselves."""
    experts = shape.layers * shape.expert_parameters
    return shape.parameters - experts + experts / ranks


def expected_expert_sent_bytes(run: DryRun) -> float:
    """Bytes that a rank sends if the ranks divide evenly loaded experts: rows, counts, and the other gradients.

    Recomputation repeats the all-to-alls of forward.
    """
    shape, size = run.shape, run.world_size
    rows = formulas.expert_parallel_sent_bytes(run.tokens, shape.hidden, shape.top_k, shape.layers, size)
    counts = formulas.ring_fraction(size) * 8 * shape.experts * shape.layers
    gradients = 2 * (shape.parameters - shape.layers * shape.expert_parameters)
    again = 1 + run.recompute
    return rows * (1 + again) / 2 + counts * again + formulas.all_reduce_sent_bytes(gradients, size)


def expected_stage_sent_bytes(run: DryRun) -> float:
    """Bytes that a stage sends: each chunk's outputs and gradients, and those of tied weights to the other end."""
    is_first, is_last = run.rank == 0, run.rank == run.world_size - 1
    directions = 2 * run.chunks - is_first - is_last if run.world_size > 1 else 0
    tied = run.shape.tied and is_first != is_last
    loss = 8 * (run.world_size > 1 and run.rank != run.world_size - 2)  # the last one in the ring passes nothing on
    activations = 2 * run.tokens * run.shape.hidden
    return directions * activations + 2 * run.shape.vocabulary * run.shape.hidden * tied + loss


def _gb(nbytes: float) -> str:
    return f"{nbytes / GB:,.3f}"


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m shared.dryrun", description=(__doc__ or "").split("\n")[0])
    parser.add_argument(
        "--strategy", default="zero3", metavar="NAME", help="name of the strategy in the registry (default: zero3)"
    )
    parser.add_argument("--model", choices=MODELS, default="llama-70b", metavar="NAME", help=", ".join(MODELS))
    parser.add_argument("--world-size", type=int, default=1024, metavar="N")
    parser.add_argument("--rank", type=int, default=0, metavar="R", help="the rank to run (default: 0)")
    parser.add_argument("--micro-batch", type=int, default=1, metavar="B", help="sequences per rank (default: 1)")
    parser.add_argument(
        "--sequence",
        type=int,
        default=2048,
        metavar="T",
        help="tokens per sequence, limited to the model's context length (default: 2048)",
    )
    parser.add_argument("--schedule", metavar="NAME", help="schedule of a pipeline, such as gpipe (default: 1f1b)")
    parser.add_argument(
        "--micro-batches", type=int, metavar="M", help="micro-batches of a pipeline's step (default: 8)"
    )
    parser.add_argument(
        "--wrappers",
        default=WRAPPERS,
        metavar="PACKAGE",
        help="package that contains the strategies (default: solutions)",
    )
    parser.add_argument(
        "--keep-activations",
        action="store_true",
        help="keep all activations instead of recomputing the layers in backward",
    )
    options = parser.parse_args()
    if min(options.world_size, options.micro_batch, options.sequence) < 1:
        parser.error("--world-size, --micro-batch and --sequence must be at least 1")
    if not 0 <= options.rank < options.world_size:
        parser.error(f"--rank must be at least 0 and less than {options.world_size}")
    try:
        known = strategies(options.wrappers)
    except (ModuleNotFoundError, AttributeError) as error:
        parser.error(f"--wrappers {options.wrappers}: {error}")
    if options.strategy not in known:
        parser.error(f"there is no strategy {options.strategy!r} for a dry run: choose one of {', '.join(known)}")
    if reason := known[options.strategy].why_not():
        parser.error(reason)
    began_s = time.monotonic()
    shape, sizes = MODELS[options.model], (options.world_size, options.micro_batch, options.sequence)
    others = {"recompute": not options.keep_activations, "package": options.wrappers, "rank": options.rank}
    pipeline = {"schedule": options.schedule, "micro_batches": options.micro_batches}
    others |= {name: value for name, value in pipeline.items() if value is not None}
    try:
        run = dry_run(shape, options.strategy, *sizes, **others)
    except ValueError as error:  # such as heads that the ranks cannot share
        parser.error(str(error))
    print(table(run))
    this_process_bytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    print(f"This process took {time.monotonic() - began_s:.1f} s and {this_process_bytes / GB:.2f} GB of memory.")
    return 0
