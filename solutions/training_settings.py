"""The settings of a training run (see train.py), and what can be wrong with them."""

import importlib.util
from dataclasses import dataclass

import torch

from shared.data import tasks
from solutions.course_strategies import build_compressor, moe
from solutions.strategies import STRATEGIES, Options, Strategy

TASKS = tasks.TASKS | {"moe": moe}
# Measure only later steps: steps 0 and 1 allocate the optimizer state and the buckets, which DDP rebuilds after the
# first backward.
LEDGER_STEP, MEMORY_STEP, FIRST_TIMED_STEP = 2, 3, 4
OPTIMIZERS = {"adamw": torch.optim.AdamW, "sgd": torch.optim.SGD}
SCHEDULES = ("gpipe", "1f1b", "interleaved", "zero_bubble")
COMPRESSIONS = ("none", "int8", "topk", "powersgd")
CHOICES = {
    "strategy": STRATEGIES,
    "model": TASKS,
    "optimizer": OPTIMIZERS,
    "schedule": SCHEDULES,
    "compress": COMPRESSIONS,
}


@dataclass(frozen=True)
class Settings:
    """What to train and how. The settings are the same on all ranks."""

    strategy: str = "overlapped_ddp"
    model: str = "mlp"
    steps: int = 60
    global_batch: int = 96  # samples per step, over all ranks
    accumulate: int = 1  # micro-batches per rank and step
    optimizer: str = "adamw"
    learning_rate: float = 3e-3
    bucket_cap_mb: float = 25.0
    seed: int = 0
    bf16: bool = False
    double: bool = False
    dp: int = 1  # replicas on a mesh
    pp: int = 0  # stages of a pipeline; 0: as many as there are ranks, or as dp and tp leave ranks for
    tp: int = 1  # ranks that share each layer on a mesh
    cp: int = 0  # ranks that share each sequence, with strategy cp; 0: as many as dp leaves ranks for
    zero_stage: int = 0  # over the replicas of a mesh: 0 or 1
    schedule: str = "1f1b"  # of a pipeline
    micro_batches: int = 8  # of a pipeline's batch, or of that of each replica on a mesh
    compress: str = "none"  # how OverlappedDDP compresses gradients

    @property
    def options(self) -> Options:
        """Return the options to build the strategy with."""
        names = ("schedule", "micro_batches", "dp", "pp", "tp", "cp", "zero_stage")
        chosen = {name: getattr(self, name) for name in names} | {"compressor": build_compressor(self.compress)}
        return Options(OPTIMIZERS[self.optimizer], {"lr": self.learning_rate}, self.bucket_cap_mb, **chosen)

    def check(self, world_size: int) -> None:
        """Check that these settings can be trained with on world_size ranks.

        Raises:
            ValueError: If they cannot. The message is one sentence.
        """
        for setting, choices in CHOICES.items():
            if (name := getattr(self, setting)) not in choices:
                raise ValueError(f"there is no {setting} {name!r}: choose one of {', '.join(choices)}")
        strategy = STRATEGIES[self.strategy]
        if reason := strategy.why_not():
            raise ValueError(reason)
        if self.model == "moe" and importlib.util.find_spec("solutions.expert_parallel") is None:
            raise ValueError("model moe needs solutions.expert_parallel, the finished module of lab 16")
        if self.accumulate > 1 and "accumulation" not in strategy.supports:
            raise ValueError(f"strategy {self.strategy} takes one micro-batch per step, got {self.accumulate}")
        if self.compress != "none":
            self.check_compression(strategy)
        if self.double and "float64" not in strategy.supports:
            raise ValueError(f"strategy {self.strategy} keeps its weights in fp32: it cannot train in double precision")
        if self.steps <= FIRST_TIMED_STEP:
            raise ValueError(
                f"steps must be above {FIRST_TIMED_STEP}, the index of the first timed step, got {self.steps}"
            )
        if self.accumulate < 1:
            raise ValueError(f"accumulate must be at least 1, got {self.accumulate}")
        models = ("gpt", "rotary-gpt") if self.strategy == "cp" else ("gpt",)
        if strategy.splits_layers and self.model not in models:
            raise ValueError(f"strategy {self.strategy} splits a GPT's layers: choose model 'gpt', not {self.model!r}")
        shares = f"the number of ranks ({world_size}) times " if not strategy.splits_layers else ""
        micro_batches = self.accumulate * (world_size if shares else self.shares_of_batch)
        if self.global_batch < 1 or self.global_batch % micro_batches:
            raise ValueError(
                f"global_batch must be a positive multiple of {micro_batches}, {shares}accumulate ({self.accumulate}), "
                f"got {self.global_batch}"
            )
        if "mesh" not in strategy.supports and (self.dp, self.tp, self.zero_stage) != (1, 1, 0):
            raise ValueError(f"strategy {self.strategy} has no mesh: dp, tp and zero_stage are for strategy 3d")
        if self.strategy == "cp":
            self.check_contexts(world_size)
        elif self.cp:
            raise ValueError(f"cp is for strategy cp, not for {self.strategy}")
        if self.bf16 and self.double:
            raise ValueError("bf16 and double cannot be combined: choose one of them")
        if strategy.is_pipelined:
            self.check_pipeline(world_size)

    @property
    def shares_of_batch(self) -> int:
        """Into how many parts the batch is cut if not every rank gets a part of its own."""
        return self.dp if self.strategy == "cp" else 1

    def check_contexts(self, world_size: int) -> None:
        """Check the sizes of a mesh of dp × cp ranks.

        Raises:
            ValueError: If they cannot be used. The message is one sentence.
        """
        if (self.pp, self.tp, self.zero_stage) != (0, 1, 0):
            raise ValueError("strategy cp has a mesh of dp and cp only: pp, tp and zero_stage are for strategy 3d")
        cp = self.cp or max(1, world_size // max(1, self.dp))
        if self.dp < 1 or self.dp * cp != world_size:
            raise ValueError(f"dp ({self.dp}) times cp ({cp}) must be the number of ranks, which is {world_size}")

    def check_compression(self, strategy: Strategy) -> None:
        """Check that this strategy's gradients can be compressed.

        Raises:
            ValueError: If they cannot. The message is one sentence.
        """
        if "compressor" not in strategy.supports:
            names = ", ".join(name for name, each in STRATEGIES.items() if "compressor" in each.supports)
            raise ValueError(f"strategy {self.strategy} cannot compress gradients: use compress with {names}")
        if importlib.util.find_spec("solutions.compression") is None:
            needed = "solutions.compression, the finished module of lab 19"
            raise ValueError(f"compress={self.compress} needs {needed}")

    def check_pipeline(self, world_size: int) -> None:
        """Check the settings of a pipeline.

        Raises:
            ValueError: If they cannot be used. The message is one sentence.
        """
        if "mesh" in STRATEGIES[self.strategy].supports:
            self.check_mesh(world_size)
        elif self.pp not in (0, world_size):
            raise ValueError(f"pp must be the number of ranks ({world_size}), got {self.pp}")
        if self.micro_batches < 1 or self.global_batch % (self.dp * self.micro_batches):
            times = f"dp ({self.dp}) times " if self.dp > 1 else ""
            raise ValueError(
                f"global_batch must be a positive multiple of {times}micro_batches ({self.micro_batches}), "
                f"got {self.global_batch}"
            )
        if self.bf16:
            raise ValueError(f"strategy {self.strategy} computes in the dtype of its weights: it cannot use bf16")

    def check_mesh(self, world_size: int) -> None:
        """Check the sizes of a mesh.

        Raises:
            ValueError: If they cannot be used. The message is one sentence.
        """
        if min(self.dp, self.tp) < 1 or self.pp < 0:
            raise ValueError(f"dp, pp and tp must be positive, got dp={self.dp}, pp={self.pp}, tp={self.tp}")
        pp = self.pp or max(1, world_size // (self.dp * self.tp))
        if self.dp * pp * self.tp != world_size:
            product = f"dp ({self.dp}) times pp ({pp}) times tp ({self.tp})"
            raise ValueError(f"{product} must be the number of ranks, which is {world_size}")
        if self.zero_stage not in (0, 1):
            raise ValueError(f"zero_stage must be 0 or 1, got {self.zero_stage}")
