"""DeepSpeed's ZeRO stages 1 to 3, with the training step that this course uses for every wrapper.

    model, optimizer = deepspeed_engine.engine(module, stage=2, optimizer_cls=torch.optim.AdamW, lr=1e-3)
    optimizer.zero_grad()
    model(inputs, targets).backward()
    optimizer.step()

Call backward() once per step(). All ranks must have built the same number of engines before, because stage 3 compares
these numbers. DeepSpeed is optional: `pip install -e '.[deepspeed]'` installs it, and `why_not()` returns why it is not
available. The first call of `engine` imports it.
"""

import importlib.util
import logging
import os
import warnings
from collections.abc import Callable, Mapping

import torch
from torch import nn

_MIB = 2**20


def why_not() -> str | None:
    """Return why DeepSpeed cannot run here and what to do about it, or None if it can run."""
    if importlib.util.find_spec("deepspeed") is None:
        return "DeepSpeed is not installed. Install it with `.venv/bin/pip install -c .venv/constraints.txt deepspeed`."
    return None


def config(
    stage: int,
    bucket_cap_mb: float = 25.0,
    prefetch_elements: int = 0,
    gradient_clipping: float | None = 0.0,
    zero_optimization: Mapping[str, object] | None = None,
) -> dict:
    """Return the config that `engine` gives to DeepSpeed, so that DeepSpeed does the same as the course's classes.

    DeepSpeed's defaults are for models with many billions of parameters. Its buckets have 500 million elements, which
    are allocated at once. Stage 3 prefetches 50 million elements, keeps parameters that are used again within a billion
    elements, and does not shard parameters with fewer than 100,000 elements. Here, buckets are as large as ours and
    torch's, and stage 3 shards every parameter and reshards it after use.

    Args:
        prefetch_elements: How many elements stage 3 prefetches. Elements that are prefetched for backward stay after
            forward, so a model not much larger than this is unsharded only once.
        gradient_clipping: The largest norm of the gradients. 0 disables clipping. None leaves it to DeepSpeed, which
            clips at 1 since version 0.19.3.
        zero_optimization: Further keys of DeepSpeed's section of this name, or other values than those described above.

    Raises:
        ValueError: If the stage is not 1, 2 or 3.

    Source: DeepSpeed's ds_config docs.
    """
    if stage not in (1, 2, 3):
        raise ValueError(f"stage must be 1, 2 or 3, got {stage}")
    elements = max(1, int(bucket_cap_mb * _MIB / 4))
    zero: dict[str, object] = {"stage": stage, "reduce_bucket_size": elements, "allgather_bucket_size": elements}
    if stage == 3:
        zero |= {"stage3_prefetch_bucket_size": prefetch_elements, "stage3_max_reuse_distance": 0}
        zero |= {"stage3_param_persistence_threshold": 0}
    zero |= zero_optimization or {}
    chosen = {
        "train_micro_batch_size_per_gpu": 1,  # required, but not used here
        "zero_optimization": zero,
        "zero_allow_untested_optimizer": True,  # DeepSpeed has not tested torch's own optimizers
        "steps_per_print": 10**9,
    }
    return chosen if gradient_clipping is None else chosen | {"gradient_clipping": gradient_clipping}


def engine(
    module: nn.Module,
    stage: int,
    optimizer_cls: Callable[..., torch.optim.Optimizer],
    bucket_cap_mb: float = 25.0,
    prefetch_elements: int = 0,
    gradient_clipping: float | None = 0.0,
    zero_optimization: Mapping[str, object] | None = None,
    **settings,
) -> tuple[nn.Module, "EngineStep"]:
    """Wrap a module with DeepSpeed, on the ranks of the current process group. Returns the model and its optimizer.

    Args:
        bucket_cap_mb, prefetch_elements, gradient_clipping, zero_optimization: Those of `config`.

    Raises:
        RuntimeError: If DeepSpeed is missing.
        ValueError: If the stage is not 1, 2 or 3.

    Communication: one broadcast per parameter.

    Source: Rajbhandari et al. 2020 (arXiv 1910.02054).
    """
    if missing := why_not():
        raise RuntimeError(missing)
    chosen = config(stage, bucket_cap_mb, prefetch_elements, gradient_clipping, zero_optimization)
    deepspeed = _import_deepspeed(module)
    optimizer = optimizer_cls(module.parameters(), **settings)
    original_linear = nn.functional.linear
    with warnings.catch_warnings(action="ignore"):
        wrapped, *_ = deepspeed.initialize(model=module, optimizer=optimizer, config=chosen, dist_init_required=False)
    warnings.filterwarnings(
        "ignore", "`torch.distributed", FutureWarning
    )  # DeepSpeed causes this warning at every step
    _isolate_linear(wrapped, original_linear)
    return wrapped, EngineStep(wrapped)


class EngineStep:
    """The optimizer of a DeepSpeed engine, with the methods that the course's training loops call."""

    def __init__(self, wrapped):
        self.wrapped = wrapped

    @property
    def state(self) -> dict:
        return self.wrapped.optimizer.state

    @property
    def param_groups(self) -> list[dict]:
        return self.wrapped.optimizer.param_groups

    def zero_grad(self) -> None:
        """Do nothing, because step() frees the gradients."""

    def step(self) -> None:
        self.wrapped.step()


def _isolate_linear(wrapped: nn.Module, original_linear: Callable) -> None:
    """Use DeepSpeed's linear function only during its model's forward; stage 3 replaces torch's for all models."""
    deepspeed_linear, nn.functional.linear = nn.functional.linear, original_linear

    def use(linear: Callable) -> None:
        nn.functional.linear = linear

    wrapped.register_forward_pre_hook(lambda *_: use(deepspeed_linear))
    wrapped.register_forward_hook(lambda *_: use(original_linear), always_call=True)


def _import_deepspeed(module: nn.Module):
    """Import DeepSpeed for this module's device, without its log output, and reset its earlier process groups."""
    device = next(module.parameters()).device
    os.environ.setdefault("DS_ACCELERATOR", device.type)
    os.environ.setdefault("LOCAL_RANK", str(device.index or 0))
    logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
    import deepspeed
    from deepspeed.utils import groups

    logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
    # This extension is for inference, and building it requires a compiler.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    deepspeed.comm.comm.cdb = groups._WORLD_GROUP = None  # the process group may have changed since the last call
    return deepspeed
