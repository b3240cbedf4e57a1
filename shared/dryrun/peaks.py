"""What ranks hold at the peak of a step, by part: counted by a dry run, or recorded from one.

A lesson shows such peaks before its readers have the strategy's module. For them, `peaks.json` has the bytes:

    python -m shared.dryrun.peaks     # count all of it again, and write the file
"""

import json
from collections.abc import Iterable
from pathlib import Path

from shared.dryrun import MODELS, dry_run, strategies

RECORDED = Path(__file__).with_suffix(".json")
PARTS = ("shards", "unsharded", "gradients", "activations", "peak")


def peaks_of(model: str, strategy: str, ranks: Iterable[tuple[int, int]]) -> list[dict[str, int]]:
    """Return the bytes of each part, and of the peak, for some (world_size, rank). Without the module, say so.

    The shards are those of parameters and optimizer state, and "gradients" includes buckets. The peak has more than
    these parts, such as temporary tensors.
    """
    ranks = list(ranks)
    if reason := strategies()[strategy].why_not():
        print(f"The bytes are recorded from our run: {reason}.")
        recorded = json.loads(RECORDED.read_text(encoding="utf-8"))
        return [recorded[_setting(model, strategy, *each)] for each in ranks]
    return [counted(model, strategy, *each) for each in ranks]


def counted(model: str, strategy: str, world_size: int, rank: int) -> dict[str, int]:
    """Count the bytes of each part in a dry run."""
    run = dry_run(MODELS[model], strategy, world_size, rank=rank)
    held = run.at_peak
    shards_bytes = run.own_parameters_bytes + held.optimizer_bytes
    gradients_bytes = held.gradients_bytes + held.buckets_bytes
    sizes = shards_bytes, run.gathered_bytes, gradients_bytes, held.activations_bytes, held.total_bytes
    return dict(zip(PARTS, sizes, strict=True))


def counted_again() -> dict[str, dict[str, int]]:
    """Count everything that is recorded."""
    found = {}
    for setting in json.loads(RECORDED.read_text(encoding="utf-8")):
        model, strategy, world_size, rank = setting.split()
        found[setting] = counted(model, strategy, int(world_size), int(rank))
    return found


def _setting(model: str, strategy: str, world_size: int, rank: int) -> str:
    return f"{model} {strategy} {world_size} {rank}"


if __name__ == "__main__":
    RECORDED.write_text(json.dumps(counted_again(), indent=2) + "\n", encoding="utf-8")
