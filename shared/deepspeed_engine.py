"""DeepSpeed's ZeRO stages 1 to 3, behind the step that this course takes with every wrapper.

    model, optimizer = deepspeed_engine.engine(module, stage=2, optimizer_cls=torch.optim.AdamW, lr=1e-3)
    optimizer.zero_grad()
    model(inputs, targets).backward()
    optimizer.step()

One backward() per step(). All ranks must have built the same engines before: they compare their counts at stage 3.
DeepSpeed is no package of the course's own: `pip install -e '.[deepspeed]'` adds it, and `why_not()` says whether it is
there. It is imported in the first call of `engine`.
"""

import importlib.util
import logging
import os
import warnings
from collections.abc import Callable

import torch
from torch import nn

_MIB = 2**20


def why_not() -> str | None:
    """→ why DeepSpeed cannot run here, and what to do; None where it can"""
    if importlib.util.find_spec("deepspeed") is None:
        return "DeepSpeed is not installed: .venv/bin/pip install -c constraints.txt deepspeed adds it"
    return None


def engine(
    module: nn.Module,
    stage: int,
    optimizer_cls: Callable[..., torch.optim.Optimizer],
    bucket_cap_mb: float = 25.0,
    prefetch_numbers: int = 0,
    gradient_clipping: float = 0.0,
    **settings,
) -> tuple[nn.Module, "EngineStep"]:
    """Hand a module to DeepSpeed, on the ranks of the current process group. → model to call, optimizer to step

    Its defaults are for models of many billions: buckets of 500 million numbers, set aside at once; at stage 3, 50
    million prefetched, kept what is used again within a billion, and all parameters below 100,000 whole. Here buckets
    are as large as ours and torch's, and stage 3 shards every parameter and lets it go after use.

    prefetch_numbers: at stage 3, what to gather ahead. What was fetched ahead for backward stays after forward, so
    that a model not much larger than this is gathered once.
    gradient_clipping: the largest norm of the gradients; 0 clips nothing.
    Comm: one broadcast per parameter. Source: Rajbhandari et al. 2020 (arXiv 1910.02054); DeepSpeed's ds_config docs.
    Raises: RuntimeError where DeepSpeed is missing, ValueError for a stage that is none of 1, 2, 3.
    """
    if missing := why_not():
        raise RuntimeError(missing)
    if stage not in (1, 2, 3):
        raise ValueError(f"DeepSpeed shards at stages 1, 2 and 3, got {stage}")
    deepspeed = _imported(module)
    numbers = max(1, int(bucket_cap_mb * _MIB / 4))
    zero = {"stage": stage, "reduce_bucket_size": numbers, "allgather_bucket_size": numbers}
    if stage == 3:
        zero |= {"stage3_prefetch_bucket_size": prefetch_numbers, "stage3_max_reuse_distance": 0}
        zero |= {"stage3_param_persistence_threshold": 0}
    config = {
        "train_micro_batch_size_per_gpu": 1,  # must be there; nothing here reads it
        "zero_optimization": zero,
        "zero_allow_untested_optimizer": True,  # torch's own optimizers are, beside DeepSpeed's
        "gradient_clipping": gradient_clipping,  # unless told so, DeepSpeed 0.19 clips their norm at 1
        "steps_per_print": 10**9,
    }
    optimizer = optimizer_cls(module.parameters(), **settings)
    torchs_linear = nn.functional.linear
    with warnings.catch_warnings(action="ignore"):
        made, *_ = deepspeed.initialize(model=module, optimizer=optimizer, config=config, dist_init_required=False)
    warnings.filterwarnings("ignore", "`torch.distributed", FutureWarning)  # of torch, to DeepSpeed, at every step
    _keep_to_itself(made, torchs_linear)
    return made, EngineStep(made)


class EngineStep:
    """A DeepSpeed engine's optimizer, with the names that the course's loops call."""

    def __init__(self, made):
        self.made = made

    @property
    def state(self) -> dict:
        return self.made.optimizer.state

    @property
    def param_groups(self) -> list[dict]:
        return self.made.optimizer.param_groups

    def zero_grad(self) -> None:
        """Do nothing: step() lets gradients go."""

    def step(self) -> None:
        self.made.step()


def _keep_to_itself(made: nn.Module, torchs_linear: Callable) -> None:
    """Let DeepSpeed's own linear stand in for torch's in its own forward: stage 3 puts it there for all models."""
    own_linear, nn.functional.linear = nn.functional.linear, torchs_linear

    def put(linear: Callable) -> None:
        nn.functional.linear = linear

    made.register_forward_pre_hook(lambda *_: put(own_linear))
    made.register_forward_hook(lambda *_: put(torchs_linear), always_call=True)


def _imported(module: nn.Module):
    """Import DeepSpeed for this module's device, quietly, and let it forget groups of before."""
    device = next(module.parameters()).device
    os.environ.setdefault("DS_ACCELERATOR", device.type)
    os.environ.setdefault("LOCAL_RANK", str(device.index or 0))
    logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
    import deepspeed
    from deepspeed.utils import groups

    logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # for inference; building it takes a compiler
    deepspeed.comm.comm.cdb = groups._WORLD_GROUP = None  # the process group may be another one than last time
    return deepspeed
