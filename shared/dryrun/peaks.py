"""What rank 0 holds at the peak of a step, by part: counted by dry runs, and recorded in `peaks.json`.

A lesson shows such peaks before its readers have the strategy's module. A dry run of a large model also takes a while.

    python -m shared.dryrun.peaks     # count all of it again, and write the file
"""

import json
from collections.abc import Iterable
from pathlib import Path

from shared import formulas, tables
from shared.dryrun import MODELS, dry_run

RECORDED = Path(__file__).with_suffix(".json")
PARTS = ("shards", "unsharded", "gradients", "activations", "peak")


def table(strategy: str, models: Iterable[tuple[str, int]]) -> tables.Table:
    """Show the recorded peaks in GB, beside 16Ψ/N, for some (model, world_size).

    The shards are those of parameters and optimizer state, and "gradients" includes buckets. The peak has more than
    these parts, such as temporary tensors.
    """
    recorded, rows = json.loads(RECORDED.read_text(encoding="utf-8")), []
    for name, world_size in models:
        formula_bytes = formulas.model_state_bytes(MODELS[name].parameters, world_size, stage=3)
        parts = recorded[_setting(name, strategy, world_size)]
        sizes = (f"{size / 1e9:.2f}" for size in (formula_bytes, *parts.values()))
        rows.append([MODELS[name].name, f"{world_size:,}", *sizes])
    note = "GB on rank 0, counted by a dry run. Shards: without gradients. The peak also has temporary tensors."
    return tables.Table(["", "N", "16Ψ/N", *PARTS], rows, note)


def counted(model: str, strategy: str, world_size: int) -> dict[str, int]:
    """Count the bytes of each part in a dry run."""
    run = dry_run(MODELS[model], strategy, world_size, rank=0)
    held = run.at_peak
    shards_bytes = run.own_parameters_bytes + held.optimizer_bytes
    gradients_bytes = held.gradients_bytes + held.buckets_bytes
    sizes = shards_bytes, run.gathered_bytes, gradients_bytes, held.activations_bytes, held.total_bytes
    return dict(zip(PARTS, sizes, strict=True))


def counted_again() -> dict[str, dict[str, int]]:
    """Count everything that is recorded."""
    found = {}
    for setting in json.loads(RECORDED.read_text(encoding="utf-8")):
        model, strategy, world_size = setting.split()
        found[setting] = counted(model, strategy, int(world_size))
    return found


def _setting(model: str, strategy: str, world_size: int) -> str:
    return f"{model} {strategy} {world_size}"


if __name__ == "__main__":
    RECORDED.write_text(json.dumps(counted_again(), indent=2) + "\n", encoding="utf-8")
