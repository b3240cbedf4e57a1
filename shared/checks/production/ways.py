"""List every way to train a model on a cluster, find the fastest that fits, and draw models and clusters."""

import itertools
import random
from dataclasses import dataclass

from shared import planner
from shared.planner import clusters
from shared.planner.clusters import Cluster
from shared.planner.shapes import SHAPES, ModelShape, gpt, llama

MARGIN = 1e-6  # Relative distance from a limit and between steps, so that no rounding decides a choice.
_GROUPS = ("all", "one host")


@dataclass(frozen=True)
class Way:
    stage: int
    shard_ranks: int
    checkpointing: str
    held_bytes: float
    step_s: float

    @property
    def choice(self) -> tuple[int, int, str]:
        return self.stage, self.shard_ranks, self.checkpointing

    @property
    def shards_least(self) -> tuple:
        return self.stage, self.checkpointing != "selective", -self.shard_ranks

    def __str__(self) -> str:
        return f"stage {self.stage} over {self.shard_ranks} ranks, {self.checkpointing} checkpointing"


@dataclass(frozen=True)
class Case:
    shape: ModelShape
    cluster: Cluster
    micro_batch: int = 1

    def __str__(self) -> str:
        gb = self.cluster.gpu_bytes / clusters.GB
        hosts = "1 host" if self.cluster.hosts == 1 else f"{self.cluster.hosts} hosts"
        where = f"{hosts} of {self.cluster.gpus_per_host} × {gb:.3g} GB"
        return f"{self.shape.parameters / 1e9:.3g}B parameters on {where}, micro_batch={self.micro_batch}"

    def ways(self) -> list[Way]:
        """List all ways that can be tried."""
        gpus, found = {"all": self.cluster.gpus, "one host": self.cluster.gpus_per_host}, []
        for stage, group, how in itertools.product(range(4), _GROUPS, ("full", "selective")):
            if stage == 0 and group == "one host":
                continue
            found.append(self.way(stage, gpus[group], how))
        return found

    def way(self, stage: int, shard_ranks: int, checkpointing: str) -> Way:
        args = {"stage": stage, "checkpointing": checkpointing, "micro_batch": self.micro_batch}
        held_bytes = planner.plan(self.shape, ranks=shard_ranks, **args).total_bytes
        step_s = clusters.step_seconds(self.shape, self.cluster, shard_ranks=shard_ranks, **args)
        return Way(stage, shard_ranks, checkpointing, held_bytes, step_s)

    def is_clear(self, ways: list[Way]) -> bool:
        """Return whether no choice depends on a rounding."""
        room = 0.9 * self.cluster.gpu_bytes
        steps = sorted({way.step_s for way in ways})
        apart = all(b - a > MARGIN * a for a, b in itertools.pairwise(steps))
        return apart and all(abs(way.held_bytes - room) > MARGIN / 2 * room for way in ways)


def fastest(case: Case, ways: list[Way], room: float = 0.9, key=lambda way: (way.step_s, *way.shards_least)):
    return min((way for way in ways if way.held_bytes <= room * case.cluster.gpu_bytes), key=key, default=None)


def draw_case(draw: random.Random, larger_batches: bool = False) -> Case:
    width = 64 * draw.randrange(8, 160)
    if draw.random() < 0.3:
        shape = SHAPES[draw.choice(sorted(SHAPES))]
    elif draw.random() < 0.5:
        shape = gpt("drawn", draw.randrange(6, 90), width, width // 64, context=2 ** draw.randrange(8, 13))
    else:
        ffn, context = 64 * (width * 8 // 3 // 64), 2 ** draw.randrange(8, 14)
        shape = llama("drawn", draw.randrange(6, 90), width, width // 64, width // 64, ffn, 32000, context)
    hosts, gpus_per_host = draw.choice((1, 2, 3, 4, 8, 32)), draw.choice((2, 4, 6, 8))
    inside = 10 ** draw.uniform(9, 11.5)
    cluster = Cluster(
        hosts,
        gpus_per_host,
        10 ** draw.uniform(10, 11.4),
        10 ** draw.uniform(13, 15),
        inside,
        inside / draw.uniform(1, 60),
    )
    return Case(shape, cluster, draw.choice((2, 4, 8)) if larger_batches else 1)
