"""Compares steps in whole milliseconds, so it takes a simpler way that is a little slower.

caught by: choose_strategy · ties
"""

from solutions import production as right


def choose_strategy(shape, cluster, micro_batch=1):
    fitting = []
    for stage in right.planner.STAGES:
        groups = {cluster.gpus, cluster.gpus_per_host} if stage else {cluster.gpus}
        for checkpointing in ("selective", "full"):
            for shard_ranks in sorted(groups, reverse=True):
                how = {"stage": stage, "checkpointing": checkpointing}
                plan = right.planner.plan(shape, ranks=shard_ranks, micro_batch=micro_batch, **how)
                if plan.total_bytes <= 0.9 * cluster.gpu_bytes:
                    took_s = right.step_seconds(shape, cluster, shard_ranks=shard_ranks, micro_batch=micro_batch, **how)
                    fitting.append(right.Choice(stage, shard_ranks, checkpointing, took_s))
    return min(fitting, key=lambda choice: round(choice.step_s, 3), default=None)
