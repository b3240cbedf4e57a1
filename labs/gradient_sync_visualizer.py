"""Show gradient synchronization: gradients before and after, which ones are reduced together, and the cost.

    torchrun --nproc_per_node=2 labs/gradient_sync_visualizer.py
    torchrun --nproc_per_node=4 labs/gradient_sync_visualizer.py --layers 12 --bucket-cap-mb 0.3 --out gpt.png

Every rank runs one backward of the same small GPT on its own text. The gradients are then averaged in three ways: with
one all-reduce per parameter, one per bucket, and one for all gradients. Rank 0 prints two tables and draws one figure.
"""

import argparse
import os
import sys
import time
from pathlib import Path
from statistics import median

import matplotlib

matplotlib.use("Agg")  # we only write a file, so no display is needed

import torch
import torch.distributed as dist
import torch.distributed.nn  # before any process group: its default arguments would keep ours alive until the end
from torch import nn

from shared import tables, wire
from shared.data import CharTokens
from shared.models import GPTConfig, TinyGPT
from shared.plots import sync as sync_plots

SAMPLES_PER_PARAMETER = 6
MB = 2**20  # bytes, as torch's DDP counts its bucket_cap_mb


def main() -> None:
    options = parse_arguments()
    device = join()
    model = model_with_gradients(options.layers, device)
    parameters = list(model.parameters())
    groupings = {
        "per parameter": [[parameter] for parameter in parameters],
        "bucketed": in_buckets(parameters, options.bucket_cap_mb * MB),
        "flat": [parameters],
    }
    own = [parameter.grad.clone() for parameter in parameters]
    before = gradients_of_all_ranks(parameters)
    costs = {name: sync_plots.Cost(*count(buckets)) for name, buckets in groupings.items()}
    for name, took_ms in times_ms(groupings, options.rounds, device).items():
        costs[name].took_ms = took_ms
    for parameter, gradient in zip(parameters, own, strict=True):
        parameter.grad.copy_(gradient)
    average(groupings["bucketed"])
    after = gradients_of_all_ranks(parameters)
    if dist.get_rank() == 0:
        report(model, groupings["bucketed"], before, after, costs, options)
    dist.destroy_process_group()  # this also ends gloo's threads; one that outlives Python would abort the process


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--bucket-cap-mb", type=float, default=0.1, help="the most MB (of 2²⁰ bytes) in a bucket")
    parser.add_argument("--layers", type=int, default=2, help="number of layers of the GPT")
    parser.add_argument("--rounds", type=int, default=20, help="how often each method is timed")
    parser.add_argument("--out", type=Path, default=Path("gradient_sync.png"), help="the file for the figure")
    options = parser.parse_args()
    if "RANK" not in os.environ:
        parser.error(
            "start this script with torchrun, which assigns the ranks: torchrun --nproc_per_node=2 " + __file__
        )
    problem = problem_with(options)
    if problem and os.environ["RANK"] == "0":
        parser.error(problem)
    if problem:
        sys.exit(2)  # rank 0 prints the reason
    return options


def problem_with(options: argparse.Namespace) -> str | None:
    """Return a sentence about the first invalid option, or None."""
    if not 0 < options.bucket_cap_mb < float("inf"):
        return f"--bucket-cap-mb must be above 0, got {options.bucket_cap_mb}"
    if options.layers < 1 or options.rounds < 1:
        return f"--layers and --rounds must be at least 1, got {options.layers} and {options.rounds}"
    if options.out.suffix != ".png":
        return f"--out must end in .png, got {options.out}"
    if not options.out.parent.is_dir():
        return f"--out must be in a folder that exists, got {options.out}"
    return None


def join() -> torch.device:
    """Join the process group that torchrun prepared. Returns this rank's device."""
    local_rank, local_ranks = int(os.environ["LOCAL_RANK"]), int(os.environ["LOCAL_WORLD_SIZE"])
    if torch.cuda.device_count() >= local_ranks and dist.is_nccl_available():
        device = torch.device("cuda", local_rank)  # not the rank, which exceeds the number of GPUs on the second host
        torch.cuda.set_device(device)
        # With device_id, NCCL connects all ranks here, and not in the middle of their first collective.
        dist.init_process_group("nccl", device_id=device)
        return device
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    return torch.device("cpu")


def model_with_gradients(layers: int, device: torch.device) -> nn.Module:
    """Build the same GPT on every rank, and run one backward on this rank's own text."""
    text = CharTokens()
    model = TinyGPT(GPTConfig(vocab_size=text.vocab_size, layers=layers)).to(device)
    starts = range(1000 * dist.get_rank(), 1000 * dist.get_rank() + 400, 100)
    inputs, targets = (batch.to(device) for batch in text.windows(starts, length=64))
    model(inputs, targets).backward()
    return model


# -- three methods of averaging, which differ only in which gradients are reduced together


def in_buckets(parameters: list[nn.Parameter], cap_bytes: float) -> list[list[nn.Parameter]]:
    """Split parameters, starting with the last one, into buckets of at most cap_bytes (or of one larger parameter)."""
    buckets, room_bytes = [], 0.0
    for parameter in reversed(parameters):
        if not buckets or parameter.nbytes > room_bytes:
            buckets.append([])
            room_bytes = cap_bytes
        buckets[-1].append(parameter)
        room_bytes -= parameter.nbytes
    return buckets


def average(buckets: list[list[nn.Parameter]]) -> None:
    """Average gradients over all ranks.

    Communication: one all_reduce per bucket.
    """
    for bucket in buckets:
        flat = torch.cat([parameter.grad.flatten() for parameter in bucket])
        dist.all_reduce(flat)
        flat /= dist.get_world_size()
        pieces = flat.split([parameter.numel() for parameter in bucket])
        for parameter, piece in zip(bucket, pieces, strict=True):
            parameter.grad.copy_(piece.view_as(parameter))


# -- costs


def count(buckets: list[list[nn.Parameter]]) -> tuple[int, float]:
    """Count the all-reduces of one averaging, and the bytes that this rank must send."""
    with wire.ledger() as log:
        average(buckets)
    return log.messages, log.sent_bytes


def times_ms(groupings: dict[str, list], rounds: int, device: torch.device) -> dict[str, float]:
    """Time the methods in turn, so that a disturbance affects all of them.

    Returns:
        Name of a method → the slowest rank's median, in ms.
    """
    times = [[took_ms(buckets, device) for buckets in groupings.values()] for _ in range(1 + rounds)][1:]
    medians = torch.tensor([median(column) for column in zip(*times, strict=True)], device=device)
    dist.all_reduce(medians, op=dist.ReduceOp.MAX)
    return dict(zip(groupings, medians.tolist(), strict=True))


def took_ms(buckets: list[list[nn.Parameter]], device: torch.device) -> float:
    dist.barrier()
    began_s = time.perf_counter()
    average(buckets)
    if device.type == "cuda":
        torch.cuda.synchronize()  # the call returns before the GPU has finished
    return 1e3 * (time.perf_counter() - began_s)


def gradients_of_all_ranks(parameters: list[nn.Parameter]) -> list[list[torch.Tensor]]:
    """Gather the gradients of all ranks. Returns one flattened gradient per parameter, for each rank."""
    own = torch.cat([parameter.grad.flatten() for parameter in parameters])
    gathered = [torch.empty_like(own) for _ in range(dist.get_world_size())]
    dist.all_gather(gathered, own)
    return [list(flat.cpu().split([parameter.numel() for parameter in parameters])) for flat in gathered]


# -- the report of rank 0


def report(model, buckets, before, after, costs, options) -> None:
    names = {parameter: name for name, parameter in model.named_parameters()}
    number_of = {parameter: number for number, bucket in enumerate(buckets, 1) for parameter in bucket}
    rows = [
        [name, f"{p.nbytes:,}", str(number_of[p]), f"{spread(before, index):.1e}", f"{spread(after, index):.1e}"]
        for index, (p, name) in enumerate(names.items())
    ]
    print(tables.Table(["parameter", "bytes", "bucket", "difference before", "difference after"], rows), end="\n\n")
    rows = [
        [name, str(cost.messages), f"{cost.sent_bytes:,.0f}", f"{cost.took_ms:.2f}"] for name, cost in costs.items()
    ]
    print(tables.Table(["method", "all-reduces", "bytes sent per rank", f"ms, median of {options.rounds}"], rows))
    figure = sync_plots.gradient_sync(
        samples_of(before, names.values()),
        samples_of(after, names.values()),
        {name: parameter.nbytes for parameter, name in names.items()},
        [[names[parameter] for parameter in bucket] for bucket in buckets],
        costs,
    )
    figure.savefig(options.out, dpi=120)
    print(f"\nThe figure was written to {options.out}.", flush=True)


def spread(gradients: list[list[torch.Tensor]], index: int) -> float:
    """Return the largest difference between two ranks in any element of a parameter's gradient."""
    stacked = torch.stack([rank_gradients[index] for rank_gradients in gradients])
    return (stacked.max(0).values - stacked.min(0).values).max().item()


def samples_of(gradients: list[list[torch.Tensor]], names) -> list[dict[str, list[float]]]:
    """Take a few elements of each gradient, at equal distances, because the figure has no room for all."""
    return [dict(zip(names, map(sampled, rank_gradients), strict=True)) for rank_gradients in gradients]


def sampled(gradient: torch.Tensor) -> list[float]:
    return gradient[:: -(-len(gradient) // SAMPLES_PER_PARAMETER)].tolist()


if __name__ == "__main__":
    main()
