"""Plans the memory that one rank needs in training, by component, for a model, N ranks, a ZeRO stage and a precision.

    plan = planner.plan(SHAPES["Llama-2 7B"], ranks=8, stage=2)
    plan.total_bytes, plan.by_component()

Everything is computed with `formulas`, so it is as accurate as they are. A plan counts:

    parameters, gradients, optimizer   sharded according to the stage
    gathered      ZeRO-3 only: the unit that computes and the next one, unsharded, in the compute precision
    activations   those of all layers, as the formula counts a layer (GELU MLP of width 4h, dropout, materialized or
                  fused attention), those of one more layer that is being recomputed, and the logits in fp32

With tensor parallelism, t ranks share each layer, and the ZeRO stage shards what is left over the N/t groups of them.
Everything is divided by t except norms, learned positions, and the activations that `formulas` does not divide.

It does not count a kernel's temporaries, gradient buckets in flight, a unit's full gradients before the reduce-scatter,
fragmentation in the allocator, the libraries' own memory, or the activations of embeddings and norms outside the
layers. A gated MLP and grouped-query attention keep other activations than the formula's layer, so the result is only
an estimate for Llama. Plan for at most 90% of a GPU's memory.
"""

from dataclasses import asdict, dataclass

from shared import formulas
from shared.formulas import BytesPerParameter
from shared.planner.shapes import ModelShape


@dataclass(frozen=True)
class Precision:
    """The bytes per parameter of the model state, and the bytes per element in computation."""

    state: BytesPerParameter
    compute_bytes: int


PRECISIONS = {
    "mixed, 16 bytes per parameter": Precision(formulas.MIXED_ADAM, 2),
    "mixed, fp32 gradients, 20 bytes per parameter": Precision(formulas.MIXED_ADAM_FP32_GRADIENTS, 2),
    "fp32, 16 bytes per parameter": Precision(formulas.FP32_ADAM, 4),
}
CHECKPOINTING = ("none", "selective", "full")
ATTENTION = formulas.ATTENTION
STAGES = {0: "DDP", 1: "ZeRO-1", 2: "ZeRO-2", 3: "ZeRO-3"}


@dataclass(frozen=True)
class Plan:
    """Bytes on one rank at the peak of a step, by component."""

    parameters: float
    gradients: float
    optimizer: float
    gathered: float
    activations: float

    @property
    def total_bytes(self) -> float:
        return sum(self.by_component().values())

    def by_component(self) -> dict[str, float]:
        return asdict(self)


def plan(
    shape: ModelShape,
    *,
    ranks: int,
    stage: int,
    precision: str = "mixed, 16 bytes per parameter",
    micro_batch: int = 1,
    sequence: int | None = None,
    checkpointing: str = "none",
    attention: str = "materialized",
    tensor_ranks: int = 1,
    sequence_parallel: bool = False,
) -> Plan:
    """Compute the bytes that a rank holds. The module's docstring says what is counted and what is not.

    Args:
        micro_batch: Sequences per group of tensor_ranks ranks.
        sequence: The sequence length. None means the model's own context length.

    Raises:
        ValueError: If the stage, the precision, the kind of checkpointing or the kind of attention is unknown, or if
            tensor_ranks does not divide the ranks and the heads.
    """
    if ranks % tensor_ranks or shape.heads % tensor_ranks:
        raise ValueError(
            f"tensor_ranks must divide the {ranks} ranks and the {shape.heads} heads, got tensor_ranks={tensor_ranks}"
        )
    if precision not in PRECISIONS:
        raise ValueError(f"precision must be one of {', '.join(map(repr, PRECISIONS))}, got {precision!r}")
    state, compute_bytes = PRECISIONS[precision].state, PRECISIONS[precision].compute_bytes

    def held_bytes(**kind: int) -> float:
        only = BytesPerParameter(**{"parameter": 0, "gradient": 0, "optimizer": 0, **kind})
        return formulas.model_state_bytes(own_parameters(shape, tensor_ranks), ranks // tensor_ranks, stage, only)

    tokens = sequence or shape.context
    return Plan(
        parameters=held_bytes(parameter=state.parameter),
        gradients=held_bytes(gradient=state.gradient),
        optimizer=held_bytes(optimizer=state.optimizer),
        gathered=gathered_bytes(shape, ranks // tensor_ranks, compute_bytes) / tensor_ranks if stage == 3 else 0.0,
        activations=activations_bytes(
            shape, micro_batch, tokens, checkpointing, compute_bytes, attention, tensor_ranks, sequence_parallel
        ),
    )


def own_parameters(shape: ModelShape, tensor_ranks: int) -> float:
    """Count the parameters of one of the ranks that share each layer. Norms and learned positions are not divided."""
    positions = shape.context * shape.hidden if shape.learned_positions else 0
    replicated = (2 * shape.layers + 1) * shape.norm_parameters + positions
    return replicated + (shape.parameters - replicated) / tensor_ranks


def gathered_bytes(shape: ModelShape, ranks: int, bytes_each: int) -> float:
    """Bytes that ZeRO-3 unshards beyond its shards: two units, because one is prefetched while another one computes."""
    peak_bytes = formulas.zero3_parameter_peak_bytes(shape.unit_parameters, ranks, bytes_each, prefetch=1)
    return peak_bytes - bytes_each * shape.parameters / ranks


def activations_bytes(
    shape: ModelShape,
    micro_batch: int,
    sequence: int,
    checkpointing: str,
    bytes_each: int,
    attention: str = "materialized",
    tensor_ranks: int = 1,
    sequence_parallel: bool = False,
) -> float:
    """Bytes of activations when backward begins, including those that backward recomputes for one layer."""

    def layer_bytes(how: str) -> float:
        options = {"checkpointing": how, "attention": attention, "bytes_each": bytes_each}
        options |= {"tensor_ranks": tensor_ranks, "sequence_parallel": sequence_parallel}
        return formulas.activation_bytes(sequence, micro_batch, shape.hidden, shape.heads, **options)

    recomputed_bytes = layer_bytes("none") - layer_bytes(checkpointing)  # in backward, one layer at a time
    logits_bytes = formulas.logits_bytes(sequence, micro_batch, shape.vocabulary) / tensor_ranks
    return shape.layers * layer_bytes(checkpointing) + recomputed_bytes + logits_bytes
