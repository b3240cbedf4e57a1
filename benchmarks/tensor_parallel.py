"""Compare the course's tensor parallelism with torch's parallelize_module: time, messages, bytes and memory.

    python -m benchmarks.tensor_parallel                 # a table
    python -m benchmarks.tensor_parallel --readme        # replace the table in README.md
    python -m benchmarks.tensor_parallel --quick         # few rounds, to see whether it runs

All strategies train the same GPT on the same batch. In each round, every strategy takes one step, in an order that is
shuffled in the same way on all ranks. A step lasts until its slowest rank is done. Ratios are computed within each
round, and the table shows their median.
"""

import argparse
import random
import statistics
import sys
import time
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)
from torch.nn import functional as F  # noqa: N812

from benchmarks import report
from benchmarks.ladder import LINKS, MB, QUICK_ROUNDS, README, WARM_UP_ROUNDS, WORLD_SIZES
from shared import formulas, hosts, memory, ranks, wire
from shared.models import Attention, GPTConfig, TinyGPT
from shared.ranks import rankside
from shared.wire import instrumentation
from solutions.strategies import STRATEGIES, Options

TOKENS = Shard(1)


class LocalHeads(Attention):
    """The attention of the rank's own heads, whose queries, keys and values come from a column-parallel layer."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:  # (B, T, D)
        query, key, value = self.query_key_value(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)  # (B, H/N, T, D/H)
        return self.project(mixed.transpose(1, 2).flatten(-2))


class OwnPositions(nn.Module):
    """Position embeddings of the rank's own tokens, whose gradient is added up over the ranks."""

    def __init__(self, embedding: nn.Embedding, mesh: DeviceMesh):
        super().__init__()
        self.embedding = parallelize_module(embedding, mesh, SequenceParallel(sequence_dim=0, use_local_output=True))

    def forward(self, positions: torch.Tensor) -> torch.Tensor:
        mesh = self.embedding.weight.device_mesh
        return self.embedding(positions.chunk(mesh.size())[mesh.get_local_rank()])


def split_by_dtensor(model: TinyGPT, mesh: DeviceMesh, sequence_parallel: bool = False) -> TinyGPT:
    """Split a TinyGPT in place, over the ranks of a mesh with one dimension. It must be the same on every rank.

    From then on, this process computes the losses of split logits with torch's loss_parallel().
    """
    size, between = mesh.size(), TOKENS if sequence_parallel else Replicate()
    for block in model.blocks:
        _split_block(block, mesh, between)
    if sequence_parallel:
        model.position_embedding = OwnPositions(model.position_embedding, mesh)
        parallelize_module(model.norm, mesh, SequenceParallel())
    tied = model.output.weight is model.token_embedding.weight
    plan = {
        "token_embedding": RowwiseParallel(input_layouts=Replicate(), output_layouts=between),
        "output": ColwiseParallel(input_layouts=between, output_layouts=Shard(-1), use_local_output=False),
    }
    parallelize_module(model, mesh, plan)
    if tied:
        model.output.weight = model.token_embedding.weight
    assert model.config.vocab_size % size == 0, "DTensor's loss_parallel() needs a vocabulary that divides evenly"
    _losses = loss_parallel()
    _losses.__enter__()  # backward needs it as well, so it is never left
    return model


def _split_block(block: nn.Module, mesh: DeviceMesh, between) -> None:
    attention, size = block.attention, mesh.size()
    # A contiguous shard must have queries, keys and values of the same heads: (3, N, …) → (N, 3, …).
    by_rank = attention.query_key_value.weight.detach().unflatten(0, (3, size, -1)).transpose(0, 1).flatten(0, 2)
    attention.query_key_value.weight = nn.Parameter(by_rank.contiguous())
    attention.heads //= size
    attention.__class__ = LocalHeads
    plan = {
        "attention.query_key_value": ColwiseParallel(),
        "attention.project": RowwiseParallel(output_layouts=between),
        "up": ColwiseParallel(input_layouts=between),
        "down": RowwiseParallel(output_layouts=between),
    }
    if between is TOKENS:
        plan["attention"] = PrepareModuleInput(input_layouts=TOKENS, desired_input_layouts=Replicate())
        plan |= {"norm_1": SequenceParallel(use_local_output=True), "norm_2": SequenceParallel(use_local_output=True)}
    parallelize_module(block, mesh, plan)


ROUNDS, TIMEOUT_S = 20, 900.0
CONFIG = GPTConfig(vocab_size=256, context=64, layers=6, heads=8, width=384)
SEQUENCES = 2
ADAMW = Options(torch.optim.AdamW, {"lr": 1e-4})
MOST_TIME = 0.9  # of torch's
TORCHS = {"tp": "parallelize_module", "tp+sp": "parallelize_module, sequence parallel"}


@dataclass(frozen=True)
class Measurement:
    """The measurements of one strategy on one rank."""

    times_ms: list[float]
    messages: int
    sent_bytes: float
    peak_mb: float


def built(name: str, device: torch.device):
    """Build one of our strategies, or torch's counterpart."""
    module = TinyGPT(CONFIG).to(device)
    if name in TORCHS:
        return STRATEGIES[name].build(module, ADAMW)
    from torch.distributed.device_mesh import init_device_mesh

    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    model = split_by_dtensor(module, mesh, sequence_parallel=name == TORCHS["tp+sp"])
    return model, ADAMW.build_optimizer(model)


def on_a_rank(rounds: int) -> dict[str, Measurement]:
    """Measure all strategies. Runs on every rank."""
    device = torch.device(rankside.here.device)
    generator = torch.Generator().manual_seed(0)
    tokens, targets = torch.randint(CONFIG.vocab_size, (2, SEQUENCES, CONFIG.context), generator=generator).to(device)
    trained = {name: built(name, device) for name in (*TORCHS, *TORCHS.values())}

    def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        optimizer.zero_grad()
        model(tokens, targets).backward()
        optimizer.step()
        instrumentation.synchronize()

    times_ms: dict[str, list[float]] = {name: [] for name in trained}
    for round_index in range(rounds + WARM_UP_ROUNDS):
        for name in random.Random(round_index).sample(list(trained), len(trained)):
            dist.barrier()
            began_s = time.perf_counter()
            step(*trained[name])
            times_ms[name].append(1e3 * (time.perf_counter() - began_s))
    measured = {}
    for name, its in trained.items():
        dist.barrier()
        with wire.ledger() as log:
            step(*its)
        with memory.peak(*its) as peak:
            step(*its)
        kept_ms = times_ms[name][WARM_UP_ROUNDS:]
        measured[name] = Measurement(kept_ms, log.messages, log.sent_bytes, peak.peak_bytes / MB)
    return measured


def expected_bytes(name: str, size: int) -> float:
    """Return what a rank sends in one step. Source: Megatron-LM (1909.08053), §3, and 2205.05198, §4.2.2."""
    tokens, width = SEQUENCES * CONFIG.context, CONFIG.width
    activations = (4 * CONFIG.layers + 2) * 4 * tokens * width
    loss = 3 * 4 * tokens
    norms_and_positions = 4 * width * (2 * (2 * CONFIG.layers + 1) + CONFIG.context)
    total = activations + loss + (norms_and_positions if name == "tp+sp" else 0)
    return formulas.all_reduce_sent_bytes(total, size)


def merged(per_rank: list[dict[str, Measurement]], name: str) -> Measurement:
    """Merge the ranks' measurements of one strategy. Each round lasts until its slowest rank is done."""
    every = [measured[name] for measured in per_rank]
    times_ms = [max(times) for times in zip(*(each.times_ms for each in every), strict=True)]
    return Measurement(times_ms, every[0].messages, every[0].sent_bytes, max(each.peak_mb for each in every))


def measure(rounds: int) -> tuple[list[list[str]], list[report.Row]]:
    """Return the lines of the table, and the aims."""
    from benchmarks.tensor_parallel import on_a_rank  # a function of __main__ could not be sent to the ranks

    lines, aims = [], []
    links = LINKS[:1] if hosts.why_not() else LINKS
    for link, size in ((link, size) for link in links for size in WORLD_SIZES):
        with report.started(size, link=link):
            per_rank = ranks.run(on_a_rank, rounds, timeout_s=TIMEOUT_S)
        for name, torchs in TORCHS.items():
            mine, other = merged(per_rank, name), merged(per_rank, torchs)
            ratios = [ours / theirs for ours, theirs in zip(mine.times_ms, other.times_ms, strict=True)]
            low, _, high = statistics.quantiles(ratios, n=4, method="inclusive")
            setting = f"{size} ranks, {link or 'loopback'}"
            aims.append(report.Row(f"{setting}: time, {name} / {torchs}", "×", ratios, MOST_TIME))
            formula = expected_bytes(name, size)
            aims.append(report.Row(f"{setting}: bytes, {name} / formula", "×", [mine.sent_bytes / formula], 1.0))
            spread = f"{aims[-2].median:.2f} ({low:.2f}–{high:.2f})"
            for title, each, ratio in ((name, mine, spread), (torchs, other, "1.00")):
                numbers = [f"{statistics.median(each.times_ms):.1f}", ratio, str(each.messages)]
                numbers += [f"{each.sent_bytes / MB:.3f}", f"{formula / MB:.3f}", f"{each.peak_mb:.1f}"]
                lines.append([link or "loopback", str(size), title, *numbers])
    return lines, aims


HEADER = ["link", "ranks", "strategy", "ms", "ratio (quartiles)", "messages", "MB sent", "formula", "peak MB"]


def as_markdown(lines: list[list[str]], aims: list[report.Row], rounds: int) -> str:
    machine = ", ".join(f"{name} {value}" for name, value in report.machine().items())
    met = sum(bool(row.met) for row in aims)
    table = ["| " + " | ".join(cells) + " |" for cells in (HEADER, ["---"] * len(HEADER), *lines)]
    return "\n".join([f"**{met} of {len(aims)} aims are met.** One run of {rounds} rounds: {machine}.", "", *table])


def main() -> int:
    parser = argparse.ArgumentParser(description="Compare the course's tensor parallelism with torch's.")
    parser.add_argument("--readme", action="store_true", help="replace the table in benchmarks/README.md")
    parser.add_argument("--rounds", type=int, default=ROUNDS, metavar="N", help=f"rounds (default: {ROUNDS})")
    parser.add_argument("--quick", action="store_true", help=f"only {QUICK_ROUNDS} rounds")
    options = parser.parse_args()
    rounds = QUICK_ROUNDS if options.quick else options.rounds
    lines, aims = measure(rounds)
    text = as_markdown(lines, aims, rounds)
    print(text, report.as_table(aims), sep="\n\n")
    if options.readme:
        report.put_between(README, "tensor parallelism", text)
    return 0 if all(row.met for row in aims) else 1


if __name__ == "__main__":
    sys.exit(main())
