"""A model that is split by depth over the stages of a pipeline: memory of each stage, bubble, and bytes sent.

    plan_stage(SHAPES["Llama-2 70B"], stages=16, stage=0, micro_batches=64).total_bytes
    bubble_of_ideal("interleaved", stages=16, micro_batches=64, chunks=5)
    stage_table("Llama-2 70B", stages=16, micro_batches=64)

The embedding, the layers and the output are a chain that is split evenly, as in chapter 15. A stage that has several
chunks has every p-th part of the chain. The two copies of a tied weight are both counted. Otherwise, a plan counts what
`planner.plan` does: the whole model state of the stage's own layers, and activations. The activations are those of the
micro-batches in flight:

    GPipe         m
    1F1B          at most p − s on stage s
    interleaved   at most 2(p − s − 1) + (v − 1)p + 1 chunks
    zero bubble   at most p, because a micro-batch counts until its weight gradients have been computed

A chunk counts as one of v equal parts of its stage, although the chain may not divide evenly. Messages that have been
sent and not yet freed are not counted.
"""

from collections.abc import Callable

from shared import formulas, planner
from shared.planner.shapes import SHAPES, ModelShape
from shared.tables import Table

GB, MB = 1e9, 1e6
SCHEDULES = ("gpipe", "1f1b", "interleaved", "zero_bubble")
DEFAULT_PRECISION = "mixed, 16 bytes per parameter"


def check_pipeline(schedule: str, stages: int, micro_batches: int, chunks: int) -> None:
    """Check that a schedule exists and can have these sizes.

    Raises:
        ValueError: If not. The message is one sentence.
    """
    if schedule not in SCHEDULES:
        raise ValueError(f"schedule must be one of {', '.join(map(repr, SCHEDULES))}, got {schedule!r}")
    if min(stages, micro_batches, chunks) < 1:
        raise ValueError(f"stages, micro_batches and chunks must be positive, got {stages}, {micro_batches}, {chunks}")
    if schedule == "interleaved" and micro_batches % stages:
        raise ValueError(f"an interleaved schedule needs a multiple of {stages} micro-batches, got {micro_batches}")


def bubble_of_ideal(schedule: str, stages: int, micro_batches: int, chunks: int = 1) -> float:
    """Idle time over ideal time. For "zero_bubble", F, B and W take equally long, and m ≥ p (else it is a little more).

    Source: Narayanan et al. 2021, §2.2; Qi et al. 2023, §2.
    """
    check_pipeline(schedule, stages, micro_batches, chunks)
    if schedule == "zero_bubble":
        return formulas.bubble_over_ideal(stages, micro_batches) / 3
    return formulas.bubble_over_ideal(stages, micro_batches, chunks if schedule == "interleaved" else 1)


def in_flight(schedule: str, stages: int, stage: int, micro_batches: int, chunks: int = 1) -> float:
    """Return how many micro-batches a stage holds at most. A micro-batch of one of v chunks counts 1/v."""
    check_pipeline(schedule, stages, micro_batches, chunks)
    after = stages - stage - 1
    most: dict[str, Callable[[], float]] = {
        "gpipe": lambda: micro_batches,
        "1f1b": lambda: after + 1,
        "interleaved": lambda: (2 * after + (chunks - 1) * stages + 1) / chunks,
        "zero_bubble": lambda: stages,
    }
    return min(most[schedule](), micro_batches)


def chain_of(shape: ModelShape) -> list[int]:
    """Return the parameters of the embedding, of each layer, and of the output with a weight of its own."""
    output = shape.norm_parameters + shape.vocabulary * shape.hidden
    return [shape.embedding_parameters, *[shape.layer_parameters] * shape.layers, output]


def parts_of_stage(shape: ModelShape, stages: int, stage: int, chunks: int = 1) -> list[range]:
    """Return which links of the chain a stage has, one range per chunk.

    Raises:
        ValueError: If there are fewer links than chunks.
    """
    count, positions = shape.layers + 2, stages * chunks
    if count < positions:
        raise ValueError(f"{count} layers, with embedding and output, cannot be split into {positions} chunks")
    own = range(stage, positions, stages)
    return [range(count * position // positions, count * (position + 1) // positions) for position in own]


def stage_parameters(shape: ModelShape, stages: int, stage: int, chunks: int = 1) -> int:
    """Count the parameters of a stage. One that has the embedding and the output has a tied weight only once."""
    chain = chain_of(shape)
    own = [index for part in parts_of_stage(shape, stages, stage, chunks) for index in part]
    is_counted_twice = shape.tied and {0, len(chain) - 1} <= set(own)
    return sum(chain[index] for index in own) - is_counted_twice * shape.vocabulary * shape.hidden


def boundary_bytes(shape: ModelShape, micro_batch: int = 1, sequence: int | None = None, bytes_each: int = 2) -> int:
    """Bytes of one message between two chunks: bsh elements, forward or backward, for one micro-batch."""
    return bytes_each * micro_batch * (sequence or shape.context) * shape.hidden


def messages_of_stage(stages: int, stage: int, micro_batches: int, chunks: int = 1) -> int:
    """Count the messages that a stage sends in a step: an output and a gradient per chunk, except at the two ends."""
    if stages == 1:
        return 0
    return micro_batches * (2 * chunks - (stage == 0) - (stage == stages - 1))


def plan_stage(
    shape: ModelShape,
    *,
    stages: int,
    stage: int,
    micro_batches: int,
    schedule: str = "1f1b",
    chunks: int = 1,
    precision: str = DEFAULT_PRECISION,
    micro_batch: int = 1,
    sequence: int | None = None,
    checkpointing: str = "none",
    attention: str = "materialized",
) -> planner.Plan:
    """Compute the bytes that the rank of a stage holds. The module's docstring says what is counted.

    Args:
        micro_batches: How many parts a batch has.
        micro_batch: Sequences in each of them.
        chunks: Chunks of layers per stage. Only an interleaved schedule can have more than one.

    Raises:
        ValueError: If the schedule, the precision, the kind of checkpointing or the kind of attention is unknown, if
            the sizes do not fit together, or if there are fewer layers than chunks.
    """
    if schedule != "interleaved" and chunks != 1:
        raise ValueError(f"only an interleaved schedule has several chunks per stage, got chunks={chunks}")
    if not 0 <= stage < stages:
        raise ValueError(f"stage must be at least 0 and less than {stages}, got {stage}")
    if precision not in planner.PRECISIONS:
        raise ValueError(f"precision must be one of {', '.join(map(repr, planner.PRECISIONS))}, got {precision!r}")
    state, compute_bytes = planner.PRECISIONS[precision].state, planner.PRECISIONS[precision].compute_bytes
    held = in_flight(schedule, stages, stage, micro_batches, chunks)
    tokens, parameters = sequence or shape.context, stage_parameters(shape, stages, stage, chunks)
    own = [index for part in parts_of_stage(shape, stages, stage, chunks) for index in part]
    layers = sum(0 < index <= shape.layers for index in own)

    def layer_bytes(how: str) -> float:
        options = {"checkpointing": how, "attention": attention, "bytes_each": compute_bytes}
        return formulas.activation_bytes(tokens, micro_batch, shape.hidden, shape.heads, **options)

    recomputed_bytes = (layer_bytes("none") - layer_bytes(checkpointing)) * (layers > 0)  # one layer at a time
    has_output = shape.layers + 1 in own
    kept = micro_batches if schedule == "gpipe" else 1  # other schedules run the backward of a loss at once
    logits_bytes = has_output * kept * formulas.logits_bytes(tokens, micro_batch, shape.vocabulary)
    return planner.Plan(
        parameters=state.parameter * parameters,
        gradients=state.gradient * parameters,
        optimizer=state.optimizer * parameters,
        gathered=0.0,
        activations=held * layers * layer_bytes(checkpointing) + recomputed_bytes + logits_bytes,
    )


def stage_table(
    model: str, *, stages: int, micro_batches: int, schedule: str = "1f1b", chunks: int = 1, **how
) -> Table:
    """Show what each stage holds and sends, in GB per step, with the bubble below.

    Args:
        model: A name in SHAPES.
        how: Other arguments of plan_stage().
    """
    shape, rows = SHAPES[model], []
    sizes = {"stages": stages, "micro_batches": micro_batches, "schedule": schedule, "chunks": chunks}
    bytes_each = planner.PRECISIONS[how.get("precision", DEFAULT_PRECISION)].compute_bytes
    message_bytes = boundary_bytes(shape, how.get("micro_batch", 1), how.get("sequence"), bytes_each)
    for stage in range(stages):
        plan = plan_stage(shape, stage=stage, **sizes, **how)
        state_bytes = plan.parameters + plan.gradients + plan.optimizer
        sent_bytes = messages_of_stage(stages, stage, micro_batches, chunks) * message_bytes
        columns = (state_bytes, plan.activations, plan.total_bytes, sent_bytes)
        rows.append([f"{stage}", *(f"{nbytes / GB:,.1f}" for nbytes in columns)])
    bubble = bubble_of_ideal(schedule, stages, micro_batches, chunks)
    note = (
        f"{model}, {schedule}, {stages} stages, {micro_batches} micro-batches. The bubble is {bubble:.1%} of the ideal "
        f"time, and {bubble / (1 + bubble):.1%} of the total time. A message has {message_bytes / MB:,.0f} MB."
    )
    return Table(["stage", "model state, GB", "activations, GB", "total, GB", "sent per step, GB"], rows, note)
