"""Judge which rank writes what: each rank writes about its own shard, and no rank gathers the others' shards."""

from pathlib import Path

import torch
from torch import nn
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.fsdp import fully_shard

from shared.checks.engine.attempts import Attempt
from shared.checks.engine.candidate import device_here, mesh_here
from shared.checks.engine.compare import describe_calls
from shared.checks.engine.failures import Wrong
from shared.checks.engine.folders import shared_folder
from shared.wire import instrumentation

WIDTH, LAYERS = 256, 4  # The tensors are much larger than their metadata.
STATE_BYTES = 3 * 4 * LAYERS * (WIDTH * WIDTH + WIDTH)  # in float32, with Adam's moments
SLACK = 1.15  # metadata of each tensor
MOST_SENT = 0.25  # As a fraction of the state: ranks exchange only their plans of what to write.


def probe_shards(save_checkpoint, folder: str) -> tuple[list, bool]:
    """Save a model of a few large tensors. Return what was sent while saving, and whether the step is missing."""
    module = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS))).to(device_here())
    mesh = mesh_here()
    for each in (*module, module):
        fully_shard(each, mesh=mesh)
    optimizer = torch.optim.AdamW(module.parameters())
    module(torch.ones(2, WIDTH, device=device_here())).sum().backward()
    optimizer.step()
    with instrumentation.listening() as calls:
        save_checkpoint(Path(folder), 1, module, optimizer)
    if not (Path(folder) / "step_1" / ".metadata").exists():
        return calls, False
    keys = FileSystemReader(Path(folder) / "step_1").read_metadata().state_dict_metadata
    return calls, not any(key.split(".")[-1] == "step" and ".state." not in key for key in keys)


def each_writes_its_shard(attempt: Attempt) -> None:
    shard_bytes = STATE_BYTES / attempt.world_size
    with shared_folder() as folder:
        found = attempt.run(probe_shards, folder)
        sizes = [path.stat().st_size for path in Path(folder).rglob("*") if path.is_file()]
    if max(sizes, default=0) > SLACK * shard_bytes:
        evidence = (
            f"the largest file has {max(sizes):,} bytes; expected about {shard_bytes:,.0f}, one rank's shard of "
            "the state"
        )
        raise Wrong(evidence, "Hint: which rank writes which tensors?")
    if not STATE_BYTES <= sum(sizes) <= SLACK * STATE_BYTES:
        evidence = (
            f"all files together have {sum(sizes):,} bytes; expected about {STATE_BYTES:,}, the size of the state"
        )
        raise Wrong(evidence, "Hint: what belongs in a checkpoint, and how many times is each tensor written?")
    if any(no_step for _, no_step in found):
        raise Wrong("the checkpoint does not contain the step", "Hint: from which step would a run resume?")
    for rank, (calls, _) in enumerate(found):
        if sum(call.payload_bytes for call in calls) > MOST_SENT * STATE_BYTES:
            evidence = (
                f"to save a state of {STATE_BYTES:,} bytes, this rank sent {describe_calls(calls)}; expected "
                "only metadata"
            )
            raise Wrong({rank: evidence}, "Hint: why would a rank need another rank's shard to write its own?")
