"""Four named training runs: what the planner computes, what their papers say, and what one may read about them.

Sources:
    GPT-3         Brown et al. 2020 (arXiv 2005.14165), §2.1, §2.3 and table 2.1; the estimate for 1,024 A100 is from
                  Narayanan et al. 2021 (arXiv 2104.04473), §5.1
    LLaMA-65B     Touvron et al. 2023 (arXiv 2302.13971), §2.2 and §2.4, table 2
    MT-NLG        Smith et al. 2022 (arXiv 2201.11990), §2.2 and §2.4
    Llama 3 405B  Grattafiori et al. 2024 (arXiv 2407.21783), §3.3.2 and table 4
"""

from collections.abc import Callable
from dataclasses import dataclass

from shared.planner import layouts
from shared.planner.layouts import Cluster, Job, TrainingLayout, a100_hosts, h100_hosts
from shared.planner.published import MODELS
from shared.planner.search import search
from shared.planner.shapes import SHAPES, llama
from shared.tables import Table

GB, DAY_S = 1e9, 86400
LLAMA_65B = llama("LLaMA 65B", 80, 8192, 64, 64, 22016, vocabulary=32000, context=2048)


@dataclass(frozen=True)
class NamedRun:
    """A run, and the figures that belong to it."""

    name: str
    elsewhere: str
    published: str
    computed: Callable[[], str]


def days(job: Job, step_s: float, tokens: float) -> float:
    """Return how many days of such steps it takes to train on so many tokens."""
    return step_s * tokens / job.tokens / DAY_S


def _needs(job: Job, layout: TrainingLayout, cluster: Cluster) -> tuple[float, float]:
    """Return the GB per GPU and the seconds per step of a layout."""
    return layouts.memory(job, layout).total_bytes / GB, layouts.step_time(job, layout, cluster).total_s


def gpt_3() -> str:
    job = Job(SHAPES["GPT-3 175B"], 1536, attention="materialized")
    how = {"checkpointing": "full", "sequence_parallel": False, "overlaps": False}
    interleaved = {"schedule": "interleaved", "chunks": 2, **how}
    gb, claimed_s = _needs(job, TrainingLayout(64, 8, 8, **interleaved), a100_hosts(512))
    _, estimated_s = _needs(job, TrainingLayout(16, 8, 8, **interleaved), a100_hosts(128))
    return (
        f"The layout of the last column would fit ({gb:.0f} GB) and take {days(job, claimed_s, 300e9):.0f} days. "
        f"1,024 A100 as 16 × 8 × 8 would take {days(job, estimated_s, 300e9):.0f}."
    )


def llama_65b() -> str:
    job, cluster = Job(LLAMA_65B, 2048), a100_hosts(256)
    found = search(job, cluster)
    per_gpu = job.tokens / found.fastest.time.total_s / cluster.gpus
    layout = found.fastest.layout
    return f"Fastest: {layout.sizes}, {layout.options[0]}, with {per_gpu:.0f} tokens/s per GPU."


def mt_nlg() -> str:
    job = Job(MODELS["529.6B"], 1920, attention="materialized")
    how = {"checkpointing": "full", "sequence_parallel": False, "overlaps": False}
    times = [_needs(job, TrainingLayout(dp, 35, 8, **how), a100_hosts(35 * dp)) for dp in (8, 10, 12)]
    steps = ", ".join(f"{step_s:.1f}" for _, step_s in times)
    return f"{times[0][0]:.0f} GB per GPU, and {steps} s per step."


def llama_3_405b() -> str:
    job = Job(SHAPES["Llama-3 405B"], 2048)
    how = {"checkpointing": "none", "schedule": "interleaved", "chunks": 8, "zero_stage": 2}
    (gb, first_s), (_, second_s) = (
        _needs(job, TrainingLayout(dp, 16, 8, **how), h100_hosts(16 * dp)) for dp in (64, 128)
    )
    tflops = [job.model_flops / step_s / gpus / 1e12 for step_s, gpus in ((first_s, 8192), (second_s, 16384))]
    return f"{tflops[0]:.0f} and {tflops[1]:.0f} TFLOP/s, but {gb:.0f} GB per GPU: too pessimistic about activations."


RUNS = (
    NamedRun(
        "GPT-3 175B",
        "4,096 A100, DP 64 × PP 8 × TP 8",
        "V100s; model parallelism within matrices and across layers; neither the number of GPUs nor the layout is "
        "published. Megatron estimates 34 days on 1,024 A100.",
        gpt_3,
    ),
    NamedRun(
        "LLaMA 65B",
        "70B, 2,048 A100, FSDP, 21 days",
        "65B, 1.4T tokens, 380 tokens/s on each of 2,048 A100, which is 20.8 days. It uses model and sequence "
        "parallelism; the layout is not published.",
        llama_65b,
    ),
    NamedRun(
        "MT-NLG 530B",
        "4,480 A100, DP 16 × PP 35 × TP 8",
        "A replica has 280 A100: PP 35 × TP 8. Throughput is reported for 2,240, 2,800 and 3,360 GPUs: 60.1, 50.2 and "
        "44.4 s per step. At these speeds, its 270B tokens take 48 to 35 days.",
        mt_nlg,
    ),
    NamedRun(
        "Llama 3 405B",
        "–",
        "PP 16 × TP 8, with DP 64 on 8,192 H100 (430 TFLOP/s per GPU) and DP 128 on 16,384 (400 TFLOP/s), without "
        "checkpointing.",
        llama_3_405b,
    ),
)


def table() -> Table:
    """Show the runs, with what the planner computes."""
    rows = [[run.name, run.computed(), run.published, run.elsewhere] for run in RUNS]
    return Table(["run", "the planner", "its paper", "elsewhere"], rows, wraps=True)
