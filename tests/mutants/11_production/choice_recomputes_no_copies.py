"""Considers full checkpointing from stage 1 on, but not for stage 0.

caught by: choose_strategy · what fits
"""

from solutions import production as right


def choose_strategy(shape, cluster, micro_batch=1):
    fitting = []
    for stage in right.planner.STAGES:
        groups = {cluster.gpus, cluster.gpus_per_host} if stage else {cluster.gpus}
        for checkpointing in ("selective", "full") if stage else ("selective",):
            for shard_ranks in sorted(groups, reverse=True):
                how = {"stage": stage, "checkpointing": checkpointing, "micro_batch": micro_batch}
                if right.planner.plan(shape, ranks=shard_ranks, **how).total_bytes <= 0.9 * cluster.gpu_bytes:
                    took_s = right.step_seconds(shape, cluster, shard_ranks=shard_ranks, **how)
                    fitting.append(right.Choice(stage, shard_ranks, checkpointing, took_s))
    return min(fitting, key=lambda choice: choice.step_s, default=None)
