"""Tries stage 0 over the GPUs of one host, so copies on different hosts never agree on their gradients.

caught by: choose_strategy · what is fast
"""

from solutions import production as right


def choose_strategy(shape, cluster, micro_batch=1):
    fitting = []
    for stage in right.planner.STAGES:
        for checkpointing in ("selective", "full"):
            for shard_ranks in sorted({cluster.gpus, cluster.gpus_per_host}, reverse=True):
                how = {"stage": stage, "checkpointing": checkpointing}
                plan = right.planner.plan(shape, ranks=shard_ranks, micro_batch=micro_batch, **how)
                if plan.total_bytes <= 0.9 * cluster.gpu_bytes:
                    took_s = right.step_seconds(shape, cluster, shard_ranks=shard_ranks, micro_batch=micro_batch, **how)
                    fitting.append(right.Choice(stage, shard_ranks, checkpointing, took_s))
    return min(fitting, key=lambda choice: choice.step_s, default=None)
