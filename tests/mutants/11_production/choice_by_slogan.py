"""Chooses the stage by parameter count alone, as is widely recommended: DDP below 2B, ZeRO-2 below 10B, ZeRO-3 above.

caught by: choose_strategy · situations
"""

from solutions import production as right


def choose_strategy(shape, cluster, micro_batch=1):
    stage = 0 if shape.parameters < 2e9 else 2 if shape.parameters < 10e9 else 3
    how = {"stage": stage, "checkpointing": "selective", "shard_ranks": cluster.gpus}
    return right.Choice(step_s=right.step_seconds(shape, cluster, micro_batch=micro_batch, **how), **how)
