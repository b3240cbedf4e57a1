"""What a strategy is, and the options to build it with. The registry of all strategies is in strategies.py."""

import importlib.util
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import nn

from shared import deepspeed_engine

Built = tuple[nn.Module, torch.optim.Optimizer]  # the model to call and the optimizer to step


@dataclass(frozen=True)
class Options:
    """How to build a strategy.

    A strategy without buckets, units, prefetching, a schedule or a mesh ignores the options that tune them. Four
    options, compute_dtype, group, param_groups and compressor, change the result of the training or the ranks that take
    part. So a strategy accepts one of them only if `supports` lists it.
    """

    optimizer_cls: Callable[..., torch.optim.Optimizer] = torch.optim.AdamW
    defaults: Mapping[str, object] = field(default_factory=dict)  # keyword arguments of the optimizer, such as lr
    bucket_cap_mb: float | None = None  # None: the strategy's default, 25, with which DDP's first bucket is smaller
    overlap_parameters: bool = False  # whether ZeRO1 gets its module, so that its collectives overlap
    prefetch: int = 1  # how many units to unshard ahead of time
    reshard_after_forward: bool = True
    min_unit_elements: int = 0  # units with fewer parameters belong to the root, which is unsharded all at once
    compute_dtype: torch.dtype | None = None
    group: dist.ProcessGroup | None = None
    param_groups: Callable[[nn.Module], list[dict]] | None = None  # builds the optimizer's parameter groups
    schedule: str = "1f1b"  # of a pipeline
    micro_batches: int = 8  # of a pipeline's batch
    dp: int = 1  # replicas on a mesh
    pp: int = 0  # stages of a pipeline on a mesh; 0: as many as dp and tp leave ranks for
    tp: int = 1  # ranks that share each layer on a mesh
    cp: int = 0  # ranks that share each sequence; 0: as many as dp leaves ranks for
    zero_stage: int = 0  # over the replicas of a mesh: 0 or 1
    compressor: object | None = None  # of the gradients, such as chapter 19's Int8()

    @property
    def bucket_options(self) -> dict[str, float]:
        """Return the keyword arguments for a wrapper with buckets."""
        return {} if self.bucket_cap_mb is None else {"bucket_cap_mb": self.bucket_cap_mb}

    def units(self, module: nn.Module) -> list[nn.Module]:
        """Return the submodules that are unsharded one at a time: the default units that are large enough."""
        from solutions.units import default_units

        sizes = {unit: sum(parameter.numel() for parameter in unit.parameters()) for unit in default_units(module)}
        return [unit for unit, size in sizes.items() if size >= self.min_unit_elements]

    def optimizer_params(self, module: nn.Module):
        """Return what the optimizer takes as its first argument: parameters or parameter groups."""
        return self.param_groups(module) if self.param_groups else module.parameters()

    def build_optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        """Build an ordinary optimizer for all parameters of a model."""
        return self.optimizer_cls(self.optimizer_params(model), **self.defaults)


@dataclass(frozen=True)
class Strategy:
    """One way to train, and what a caller has to know about it."""

    name: str  # on the command line
    title: str  # in tables and figures
    provider: str  # course, torch or deepspeed
    stage: int  # ZeRO stage. 0: nothing is sharded, 1: the optimizer state, 2: gradients too, 3: parameters too
    wrap: Callable[[nn.Module, Options], Built]
    # Names of options; "accumulation" of micro-batches; "float64" throughout; a "mesh".
    supports: frozenset[str] = frozenset()
    needs: str | None = None  # a module that a lab exports
    chapter: int | None = None  # the chapter of that lab
    counterpart: str | None = None  # the strategy of another provider that does the same
    splits_layers: bool = False  # a GPT's layers: all ranks get the same batch, and model(x, y) returns the loss
    is_pipelined: bool = False  # then splits_layers, too, and model.step(x, y) also runs backward
    shards_experts: bool = False  # a model without experts trains as with ManualDDP

    def why_not(self) -> str | None:
        """Return a sentence that says why the strategy cannot be built here, or None if it can."""
        if self.provider == "deepspeed":
            return deepspeed_engine.why_not()
        if self.needs and importlib.util.find_spec(self.needs) is None:
            module = f"{self.needs}, the finished module of lab {self.chapter:02d}"
            return f"strategy {self.name} needs {module}, which you get with the chapter after it"
        return None

    def build(self, module: nn.Module, options: Options | None = None) -> Built:
        """Wrap a module. To be called on every rank of the group.

        Returns:
            The model to call and the optimizer to step.

        Raises:
            RuntimeError: If the strategy cannot be built here.
            ValueError: If the strategy does not support one of the options.
        """
        if reason := self.why_not():
            raise RuntimeError(reason)
        options = options or Options()
        for name in ("compute_dtype", "group", "param_groups", "compressor"):
            if getattr(options, name) is not None and name not in self.supports:
                raise ValueError(f"strategy {self.name} does not support the option {name}")
        return self.wrap(module, options)
