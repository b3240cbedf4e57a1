"""Published training runs whose layout and speed are both known: model, GPUs, layout, and seconds per step.

Each speed is in the source as a time per step, as FLOP/s per GPU or as tokens per second, and converted here to seconds
per step. Every run lists what its source does not say and we had to assume. Left out are runs in FP8 (their peak is not
known) and with context parallelism.

Sources:
    Megatron-2   Narayanan et al. 2021, "Efficient Large-Scale Language Model Training on GPU Clusters Using
                 Megatron-LM" (arXiv 2104.04473), tables 1 and 2, and equation 3 for the FLOPs per step
    Megatron-3   Korthikanti et al. 2022, "Reducing Activation Recomputation in Large Transformer Models"
                 (arXiv 2205.05198), tables 3 and 5, and §6.3 for the run with data parallelism
    MT-NLG       Smith et al. 2022, "Using DeepSpeed and Megatron to Train Megatron-Turing NLG 530B" (arXiv 2201.11990),
                 §2.2 and §2.4; read in transcriptions of these passages that agree
    MegaScale    Jiang et al. 2024, "MegaScale: Scaling Large Language Model Training to More Than 10,000 GPUs"
                 (arXiv 2402.15627), tables 1 and 2, the rows of its baseline, Megatron-LM
    Llama 3      Grattafiori et al. 2024, "The Llama 3 Herd of Models" (arXiv 2407.21783), table 4 and §3.3.2
    torchtitan   github.com/pytorch/torchtitan, benchmarks/llama3_h100_202412_torchtitan.md, tables 1 and 3. By default,
                 its selective checkpointing recomputes every second matmul (_apply_ac_to_transformer_block).
"""

from dataclasses import dataclass, replace

from shared.planner.layouts import Cluster, Job, TrainingLayout, a100_hosts, h100_hosts
from shared.planner.shapes import SHAPES, ModelShape, gpt


@dataclass(frozen=True)
class Published:
    """A run, and how long its steps took.

    Attributes:
        fits: Whether it is one of the runs to which the planner's constants were fitted. The others test them.
        assumed: What the source does not say.
    """

    source: str
    name: str
    job: Job
    layout: TrainingLayout
    cluster: Cluster
    step_s: float
    fits: bool = False
    assumed: str = ""

    def __str__(self) -> str:
        return f"{self.source}: {self.name}, {self.cluster.gpus:,} GPUs"


def _model(name: str, layers: int, hidden: int, heads: int, vocabulary: int = 51200) -> ModelShape:
    return replace(gpt(name, layers, hidden, heads, context=2048), vocabulary=vocabulary)


MODELS = {
    "1.7B": _model("1.7B", 24, 2304, 24),
    "3.6B": _model("3.6B", 30, 3072, 32),
    "7.5B": _model("7.5B", 36, 4096, 32),
    "18.4B": _model("18.4B", 40, 6144, 48),
    "22B": _model("22B", 48, 6144, 64),
    "39.1B": _model("39.1B", 48, 8192, 64),
    "76.1B": _model("76.1B", 60, 10240, 80),
    "145.6B": _model("145.6B", 80, 12288, 96),
    "174.6B": _model("174.6B", 96, 12288, 96),
    "310.1B": _model("310.1B", 96, 16384, 128),
    "529.6B": _model("529.6B", 105, 20480, 128),
    "1008B": _model("1008B", 128, 25600, 160),
}


def _flops_with_recomputation(job: Job) -> float:
    """FLOPs of a step as Megatron-2 counts them: layers are computed twice forward. Source: its equation 3."""
    shape = job.shape
    per_layer = 96 * job.tokens * shape.hidden**2 * (1 + job.length / (6 * shape.hidden))
    return shape.layers * per_layer + 6 * job.tokens * shape.hidden * shape.vocabulary


def _megatron_2(
    table: int, model: str, layout: TrainingLayout, sequences: int, tflops: float, *, fits: bool = False
) -> Published:
    job = Job(MODELS[model], sequences, attention="materialized")
    layout = replace(layout, checkpointing="full", sequence_parallel=False, overlaps=False)
    step_s = _flops_with_recomputation(job) / (layout.ranks * tflops * 1e12)
    cluster = a100_hosts(layout.ranks // 8)
    assumed = "micro-batch of 1, " * (table == 1) + "two chunks per stage where they divide the layers, else three"
    return Published(f"Megatron-2, table {table}", model, job, layout, cluster, step_s, fits, assumed)


def _interleaved(dp: int, pp: int, tp: int, chunks: int, micro_batch: int = 1) -> TrainingLayout:
    schedule = "interleaved" if chunks > 1 else "1f1b"
    return TrainingLayout(dp, pp, tp, micro_batch=micro_batch, schedule=schedule, chunks=chunks)


_TABLE_1 = [
    _megatron_2(1, "1.7B", _interleaved(32, 1, 1, 1), 512, 137, fits=True),
    _megatron_2(1, "3.6B", _interleaved(32, 1, 2, 1), 512, 138),
    _megatron_2(1, "7.5B", _interleaved(32, 1, 4, 1), 512, 142, fits=True),
    _megatron_2(1, "18.4B", _interleaved(32, 1, 8, 1), 1024, 135),
    _megatron_2(1, "39.1B", _interleaved(32, 2, 8, 2), 1536, 138, fits=True),
    _megatron_2(1, "76.1B", _interleaved(32, 4, 8, 3), 1792, 140),
    _megatron_2(1, "145.6B", _interleaved(24, 8, 8, 2), 2304, 148, fits=True),
    _megatron_2(1, "310.1B", _interleaved(15, 16, 8, 2), 2160, 155),
    _megatron_2(1, "529.6B", _interleaved(9, 35, 8, 3), 2520, 163, fits=True),
    _megatron_2(1, "1008B", _interleaved(6, 64, 8, 2), 3072, 163),
]
_TABLE_2 = [
    _megatron_2(2, "174.6B", _interleaved(dp, 12, 8, 2), 1536, tflops) for dp, tflops in ((4, 153), (8, 149), (16, 141))
] + [
    _megatron_2(2, "529.6B", _interleaved(dp, 35, 8, 3), 2240, tflops) for dp, tflops in ((2, 171), (4, 167), (8, 159))
]


def _zero_3(model: str, gpus: int, sequences: int, micro_batch: int, tflops: float) -> Published:
    job = Job(MODELS[model], sequences, attention="materialized")
    layout = TrainingLayout(gpus, 1, 1, 3, micro_batch, "full")
    step_s = _flops_with_recomputation(job) / (gpus * tflops * 1e12)
    assumed = "that ZeRO-3's communication overlaps"
    name = f"{model}, ZeRO-3"
    return Published("Megatron-2, table 2", name, job, layout, a100_hosts(gpus // 8), step_s, assumed=assumed)


_ZERO_3 = [
    _zero_3("174.6B", 384, 1536, 4, 144),
    _zero_3("174.6B", 768, 1536, 2, 88),
    _zero_3("174.6B", 1536, 1536, 1, 44),
    _zero_3("529.6B", 640, 2560, 4, 138),
    _zero_3("529.6B", 1120, 2240, 2, 98),
    _zero_3("529.6B", 2240, 2240, 1, 48),
]


def _megatron_3(model: str, pp: int, chunks: int, sequences: int, full_s: float, selective_s: float) -> list[Published]:
    job = Job(MODELS[model], sequences, attention="materialized")
    layout = replace(_interleaved(1, pp, 8, chunks, 4 if pp == 1 else 1), overlaps=False)
    assumed = "two chunks per stage" if model == "1008B" else ""
    runs = {
        "full recomputation": replace(layout, checkpointing="full", sequence_parallel=False),
        "SP, selective": layout,
    }
    return [
        Published("Megatron-3, table 5", f"{model}, {how}", job, of_run, a100_hosts(pp), step_s, assumed=assumed)
        for (how, of_run), step_s in zip(runs.items(), (full_s, selective_s), strict=True)
    ]


_TABLE_5 = [
    *_megatron_3("22B", 1, 1, 4, 1.42, 1.10),
    *_megatron_3("174.6B", 8, 3, 64, 18.13, 13.75),
    *_megatron_3("529.6B", 35, 3, 280, 49.05, 37.83),
    *_megatron_3("1008B", 64, 2, 512, 94.42, 71.49),
]
_WITH_DATA_PARALLELISM = replace(
    _TABLE_5[5],
    source="Megatron-3, §6.3",
    job=replace(_TABLE_5[5].job, sequences=8 * 280),
    layout=replace(_TABLE_5[5].layout, dp=8),
    cluster=a100_hosts(280),
    step_s=39.15,
)


def _mt_nlg(hosts: int, step_s: float) -> Published:
    job = Job(MODELS["529.6B"], 1920, attention="materialized")
    layout = TrainingLayout(hosts * 8 // 280, 35, 8, checkpointing="full", sequence_parallel=False, overlaps=False)
    assumed = "micro-batch of 1, 1F1B, full recomputation"
    return Published("MT-NLG, §2.4", "530B", job, layout, a100_hosts(hosts), step_s, assumed=assumed)


_MT_NLG = [_mt_nlg(280, 60.1), _mt_nlg(350, 50.2), _mt_nlg(420, 44.4)]


def _megascale(gpus: int, sequences: int, step_s: float) -> Published:
    job = Job(_model("175B", 96, 12288, 128, vocabulary=64000), sequences)
    layout = replace(_interleaved(gpus // 64, 8, 8, 6), overlaps=False)
    assumed = "micro-batch of 1, fused attention, SP, hosts of 8 A100 with eight adapters of 200 Gbit/s"
    return Published("MegaScale, table 2", "175B", job, layout, a100_hosts(gpus // 8), step_s, assumed=assumed)


_MEGASCALE = [
    _megascale(gpus, sequences, step_s)
    for gpus, sequences, step_s in (
        (256, 768, 40.0),
        (512, 768, 21.2),
        (768, 768, 15.2),
        (1024, 768, 11.9),
        (3072, 6144, 29.02),
        (6144, 6144, 14.78),
        (8192, 6144, 12.24),
        (12288, 6144, 8.57),
    )
]


def _llama_3(dp: int, tflops: float, *, fits: bool = False) -> Published:
    job = Job(SHAPES["Llama-3 405B"], 2048)
    # §3.3.2: interleaved, and the first chunk of the first stage has only the embedding, so a chunk is a single layer.
    layout = TrainingLayout(dp, 16, 8, 1, checkpointing="none", schedule="interleaved", chunks=8)
    step_s = job.model_flops / (layout.ranks * tflops * 1e12)
    assumed = "micro-batch of 1, FLOPs that include attention"
    return Published("Llama 3, table 4", "405B", job, layout, h100_hosts(layout.ranks // 8), step_s, fits, assumed)


_LLAMA_3 = [_llama_3(64, 430, fits=True), _llama_3(128, 400)]


def _torchtitan(table: int, gpus: int, how: str, tokens_per_s: float) -> Published:
    job = Job(SHAPES["Llama-3 8B"], 2 * gpus)
    layout = TrainingLayout(gpus, 1, 1, 3, micro_batch=2)
    cluster, step_s = h100_hosts(gpus // 8), 2 * job.length / tokens_per_s
    cluster = replace(cluster, gpu=replace(cluster.gpu, memory_bytes=96 * 2**30, memory_bytes_per_s=2.4e12))
    assumed = "the peak of an H100 with 700 W, although these had a limit of 500 W, and no recomputation of matmuls"
    return Published(f"torchtitan, table {table}", f"8B{how}", job, layout, cluster, step_s, assumed=assumed)


_TORCHTITAN = [
    _torchtitan(1, 8, "", 5762),
    _torchtitan(1, 8, ", compiled", 6667),
    _torchtitan(3, 128, "", 5605),
    _torchtitan(3, 128, ", compiled", 6514),
]

RUNS: list[Published] = [
    *_TABLE_1,
    *_TABLE_2,
    *_ZERO_3,
    *_TABLE_5,
    _WITH_DATA_PARALLELISM,
    *_MT_NLG,
    *_MEGASCALE,
    *_LLAMA_3,
    *_TORCHTITAN,
]
