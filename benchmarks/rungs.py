"""What the benchmarks compare: the strategies of solutions/strategies.py, baselines, and targets for ours."""

from collections.abc import Callable
from dataclasses import dataclass, field, replace

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from shared import deepspeed_engine
from shared.models import GPTConfig, TinyGPT
from solutions.manual_ddp import broadcast_state
from solutions.strategies import STRATEGIES, Built, Options

Build = Callable[[nn.Module], Built]

TITLE = {name: strategy.title for name, strategy in STRATEGIES.items()}
ALONE, DDP, FLAT = "module alone", "DDP", "flat"  # these are no strategies of the registry
DDP_VIEW, FSDP2 = TITLE["ddp"], TITLE["fsdp2"]


@dataclass(frozen=True)
class Target:
    """The most time or memory that one strategy may take, as a multiple of another."""

    mine: str
    other: str
    most: float


@dataclass(frozen=True)
class Rungs:
    """Strategies and baselines that take turns in one run, by their titles."""

    builds: dict[str, Build]
    times: tuple[Target, ...]
    peaks: tuple[Target, ...]
    carried: tuple[Target, ...] = field(default=())


# -- models


class ManySmall(nn.Module):
    """100 layers of 64×64, with little to compute and little to send, so that the cost per parameter dominates."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(100))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = x + 0.1 * layer(x)  # without the residual, values would shrink to denormal numbers, which are slow
        return x.square().mean()


def _gpt() -> tuple[nn.Module, tuple[torch.Tensor, ...]]:
    config = GPTConfig(vocab_size=256, context=64, layers=6, heads=6, width=384)
    tokens = torch.randint(config.vocab_size, (2, config.context))
    return TinyGPT(config), (tokens, tokens)


MODELS: dict[
    str, Callable[[], tuple[nn.Module, tuple[torch.Tensor, ...]]]
] = {  # a module that returns the loss, and its inputs
    "TinyGPT": _gpt,
    "many small": lambda: (ManySmall(), (torch.randn(32, 64),)),
}


# -- strategies

SGD = Options(torch.optim.SGD, {"lr": 1e-4})
ADAMW = Options(torch.optim.AdamW, {"lr": 1e-4})


def strategies(options: Options, *names: str) -> dict[str, Build]:
    return {TITLE[name]: lambda module, name=name: STRATEGIES[name].build(module, options) for name in names}


def variants(suffix: str, options: Options, *names: str) -> dict[str, Build]:
    """Build strategies with other options, under their titles and a suffix that says what is different."""
    return {f"{title}, {suffix}": build for title, build in strategies(options, *names).items()}


def baseline(options: Options, wrap: Callable[[nn.Module], nn.Module]) -> Build:
    def build(module: nn.Module) -> Built:
        model = wrap(module)
        return model, options.build_optimizer(model)

    return build


def beside(name: str, most: float) -> Target:
    """Return the target of one of our strategies relative to its counterpart."""
    return Target(TITLE[name], TITLE[STRATEGIES[name].counterpart], most)


# -- averaging gradients


class FlatDDP(nn.Module):
    """The simplest way to use only one collective: after backward, copy all gradients into a tensor and reduce it."""

    def __init__(self, module: nn.Module):
        super().__init__()
        self.module = module
        broadcast_state(module)

    def forward(self, *inputs):
        return self.module(*inputs)

    def finish_gradient_sync(self) -> None:
        parameters = list(self.module.parameters())
        flat = torch.cat([parameter.grad.flatten() for parameter in parameters])
        dist.all_reduce(flat)
        flat /= dist.get_world_size()
        pieces = flat.split([parameter.numel() for parameter in parameters])
        for parameter, piece in zip(parameters, pieces, strict=True):
            parameter.grad = piece.view_as(parameter)


AVERAGING = Rungs(
    builds={
        ALONE: baseline(SGD, lambda module: module),
        DDP: baseline(SGD, DistributedDataParallel),
        **strategies(SGD, "ddp"),
        FLAT: baseline(SGD, FlatDDP),
        **strategies(SGD, "manual_ddp", "bucketed_ddp", "overlapped_ddp"),
    },
    times=(beside("overlapped_ddp", 1.0), Target(TITLE["bucketed_ddp"], FLAT, 1.1)),
    # BucketedDDP's buckets are a second copy of the gradients, like DDP's without bucket views. A bucket also keeps its
    # divisor, which has four bytes.
    peaks=(Target(TITLE["bucketed_ddp"], DDP, 1.001), beside("overlapped_ddp", 1.001)),
)

# -- DeepSpeed

TUNED_STAGE = {"DeepSpeed 1, tuned": 1, "DeepSpeed 2, tuned": 2, "DeepSpeed 3, kept, tuned": 3, "DeepSpeed 3, tuned": 3}

_REDUCED_TO_OWNERS = {"compute_grad_norm": False, "use_multi_rank_bucket_allreduce": False}
_NOT_PACKED = {"compute_grad_norm": False, "contiguous_gradients": False}
_PREFETCHED = {"contiguous_gradients": False, "stage3_prefetch_bucket_size": 1_800_000}  # as large as TinyGPT's blocks
_KEPT = {"stage3_max_reuse_distance": 1_000_000_000}
_SMALL_BUCKETS = {"reduce_bucket_size": 2_000_000}
_BLOCKS = {"leaf_module": {"classes": ["Block"]}}
_AS_MANY_LIVE_AS_OURS = {"stage3_max_live_parameters": 3_700_000}  # the root and two blocks of TinyGPT

# For each model, the values in the section `zero_optimization` that differ from those of `deepspeed_engine.config`.
# They do not change what is computed. README.md says why these were chosen.
TUNED: dict[type[nn.Module], dict[str, dict[str, object]]] = {
    TinyGPT: {
        "DeepSpeed 1, tuned": _SMALL_BUCKETS | _REDUCED_TO_OWNERS,
        "DeepSpeed 2, tuned": _SMALL_BUCKETS | _REDUCED_TO_OWNERS,
        "DeepSpeed 3, kept, tuned": _SMALL_BUCKETS | _PREFETCHED | _BLOCKS | _KEPT,
        "DeepSpeed 3, tuned": _SMALL_BUCKETS | _PREFETCHED | _BLOCKS | _AS_MANY_LIVE_AS_OURS,
    },
    ManySmall: {
        "DeepSpeed 1, tuned": _NOT_PACKED,
        "DeepSpeed 2, tuned": _NOT_PACKED,
        "DeepSpeed 3, kept, tuned": _PREFETCHED | _KEPT,
        "DeepSpeed 3, tuned": _PREFETCHED,
    },
}


def tuned(title: str) -> dict[str, Build]:
    """Build DeepSpeed with the settings that `TUNED` has for the module's class."""

    def build(module: nn.Module) -> Built:
        settings = {"zero_optimization": TUNED[type(module)][title], **ADAMW.defaults}
        return deepspeed_engine.engine(module, TUNED_STAGE[title], ADAMW.optimizer_cls, **settings)

    return {title: build}


# -- sharding

OVERLAPPED = replace(ADAMW, overlap_parameters=True)  # ZeRO1 knows its module
KEPT = replace(ADAMW, reshard_after_forward=False)  # parameters stay unsharded from forward to backward
# Units with fewer parameters belong to the root. DeepSpeed's stage3_param_persistence_threshold has the same default.
COALESCED = replace(ADAMW, min_unit_elements=100_000)
KEPT_COALESCED = replace(KEPT, min_unit_elements=COALESCED.min_unit_elements)


def in_mode(name: str, *suffixes: str) -> str:
    """Return the title of a strategy that is built with other options."""
    return ", ".join([TITLE[name], *suffixes])


def _same_mode(name: str, other: str, most: float) -> tuple[Target, ...]:
    """Compare two strategies in each mode: with and without resharding after forward, plain and coalesced."""
    modes = (("kept",), ("kept", "coalesced"), (), ("coalesced",))
    return tuple(Target(in_mode(name, *mode), in_mode(other, *mode), most) for mode in modes)


# Plain is compared with plain, tuned with tuned, and kept with kept.
BESIDE_DEEPSPEED = tuple(
    Target(mine, other, 0.8)
    for mine, other in (
        (TITLE["zero1"], "DeepSpeed 1"),
        (TITLE["zero1"], "DeepSpeed 1, tuned"),
        (TITLE["zero2"], "DeepSpeed 2"),
        (TITLE["zero2"], "DeepSpeed 2, tuned"),
        (in_mode("zero3", "kept"), "DeepSpeed 3, kept"),
        (in_mode("zero3", "kept", "coalesced"), "DeepSpeed 3, kept, tuned"),
        (TITLE["zero3"], "DeepSpeed 3"),
        (in_mode("zero3", "coalesced"), "DeepSpeed 3, tuned"),
    )
)


def _without_missing(rungs: Rungs) -> Rungs:
    """Leave DeepSpeed out if it is not installed."""
    if not deepspeed_engine.why_not():
        return rungs
    builds = {title: build for title, build in rungs.builds.items() if not title.startswith("DeepSpeed")}
    return replace(rungs, builds=builds, times=tuple(each for each in rungs.times if each.other in builds))


# Neighbors in tables and figures do the same: torch's, ours, DeepSpeed's.
SHARDING = _without_missing(
    Rungs(
        builds={
            ALONE: baseline(ADAMW, lambda module: module),
            **strategies(ADAMW, "ddp", "zero_redundancy", "zero1", "deepspeed1"),
            **variants("with its module", OVERLAPPED, "zero1"),
            **tuned("DeepSpeed 1, tuned"),
            **variants("kept", KEPT, "fsdp2"),
            **strategies(ADAMW, "zero2", "deepspeed2"),
            **tuned("DeepSpeed 2, tuned"),
            **variants("kept", KEPT, "zero3", "deepspeed3"),
            **variants("kept, coalesced", KEPT_COALESCED, "fsdp2", "zero3"),
            **tuned("DeepSpeed 3, kept, tuned"),
            **strategies(ADAMW, "fsdp2", "zero3", "deepspeed3"),
            **variants("coalesced", COALESCED, "fsdp2", "zero3"),
            **tuned("DeepSpeed 3, tuned"),
        },
        times=(
            beside("zero1", 0.85),
            Target(TITLE["zero2"], in_mode("fsdp2", "kept"), 0.65),
            *_same_mode("zero3", "fsdp2", 0.65),
            *BESIDE_DEEPSPEED,
        ),
        peaks=(beside("zero1", 1.0), beside("zero3", 1.0)),
        carried=(Target(TITLE["zero2"], in_mode("fsdp2", "kept"), 1.0), beside("zero3", 1.0)),
    )
)


def same_as(rungs: Rungs, module: nn.Module) -> dict[str, str]:
    """Return which strategies build the same as a plain one, because all units of this module are large."""
    if COALESCED.units(module) != ADAMW.units(module):
        return {}
    plain = {title: title.removesuffix(", coalesced") for title in rungs.builds}
    return {title: other for title, other in plain.items() if title != other}


# On a GPU, the strategies run one after another. FSDP1 and DeepSpeed are left out: the ladder measures DeepSpeed.
ON_A_GPU: dict[str, Build] = {
    ALONE: baseline(ADAMW, lambda module: module),
    **strategies(ADAMW, "ddp", "manual_ddp", "bucketed_ddp", "overlapped_ddp", "zero_redundancy", "zero1", "zero2"),
    **strategies(ADAMW, "fsdp2", "zero3"),
}

RUNGS = {"averaging": AVERAGING, "sharding": SHARDING}
