"""Who writes what of a checkpoint: each rank about its own shard, and no rank collects the others' to do so."""

import tempfile
from pathlib import Path

import torch
from torch import nn
from torch.distributed.fsdp import fully_shard

from shared.checks.engine.candidate import device_here
from shared.checks.engine.compare import describe_calls
from shared.checks.engine.framework import Attempt, Wrong
from shared.wire import instrumentation

WIDTH, LAYERS = 256, 4  # large enough that what describes the tensors is little beside them
STATE_BYTES = 3 * 4 * LAYERS * (WIDTH * WIDTH + WIDTH)  # in float32, with Adam's moments
SLACK = 1.15  # what describes each tensor
MOST_SENT = 0.25  # of the state: ranks tell one another what they will write, and no more


def probe_shards(save_checkpoint, folder: str) -> list:
    """Save a model of a few large tensors. → what was sent meanwhile"""
    module = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS))).to(device_here())
    for each in (*module, module):
        fully_shard(each)
    optimizer = torch.optim.AdamW(module.parameters())
    module(torch.ones(2, WIDTH, device=device_here())).sum().backward()
    optimizer.step()
    with instrumentation.listening() as calls:
        save_checkpoint(Path(folder), 1, module, optimizer)
    return calls


def each_writes_its_shard(attempt: Attempt) -> None:
    shard_bytes = STATE_BYTES / attempt.world_size
    with tempfile.TemporaryDirectory() as folder:
        found = attempt.run(probe_shards, folder)
        sizes = [path.stat().st_size for path in Path(folder).rglob("*") if path.is_file()]
    if max(sizes, default=0) > SLACK * shard_bytes:
        evidence = f"the largest file has {max(sizes):,} bytes; a rank's shard of the state is {shard_bytes:,.0f}"
        raise Wrong(evidence, "Look at: who writes what?")
    if not STATE_BYTES <= sum(sizes) <= SLACK * STATE_BYTES:
        evidence = f"all files together have {sum(sizes):,} bytes; the state is {STATE_BYTES:,}"
        raise Wrong(evidence, "Look at: what belongs to a checkpoint, and how often is it written?")
    for rank, calls in enumerate(found):
        if sum(call.payload_bytes for call in calls) > MOST_SENT * STATE_BYTES:
            evidence = f"to save a state of {STATE_BYTES:,} bytes, {describe_calls(calls)} are sent"
            raise Wrong({rank: evidence}, "Look at: who needs another rank's shard of the state to write its own?")
