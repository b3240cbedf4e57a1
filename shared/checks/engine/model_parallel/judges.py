"""Judge a split model, with one function for each thing that can go wrong.

A chapter trains a `Case` once per world size and passes the result to the judges that its check needs.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from shared import wire
from shared.checks.engine.attempts import Attempt
from shared.checks.engine.compare import RELATIVE_TOLERANCE, describe_calls, first_difference, nearly_equal, total_of
from shared.checks.engine.failures import Wrong
from shared.checks.engine.model_parallel.case import (
    STEPS,
    Case,
    Collective,
    Draw,
    Shard,
    Step,
    one_process,
    parameters_of,
)
from shared.checks.engine.model_parallel.probe import Held, SplitStep, SplitTraining, probe_memory, probe_split
from shared.checks.engine.sizes import LARGE_ON
from shared.checks.engine.subgroups import members_of
from shared.wire.instrumentation import Call

# -- recognize common mistakes in a split model by the values that they produce


HINT_ON_GRAPH = "Hint: on this rank, does the autograd graph lead from the loss back to this tensor?"
_IN_FLOAT32 = 1e-5


def of_an_output(
    found: torch.Tensor,
    expected: torch.Tensor,
    every: list[torch.Tensor],
    state: dict[str, torch.Tensor],
    otherwise: str,
) -> str:
    """Return a hint on a wrong output.

    Args:
        found: The output of one rank.
        expected: What it should be.
        every: The outputs of all ranks.
        state: The parameters that one process computes with.
        otherwise: The hint if nothing is recognized.
    """
    size = len(every)
    if found.shape != expected.shape:
        return "Hint: along which dimension are the ranks' outputs concatenated?"
    if size > 1 and nearly_equal(found * size, expected):
        return f"It is exactly {size} times too small. Hint: are partial sums added or averaged?"
    if size > 1 and _add_up_to(every, expected):
        return "The ranks' outputs add up to the right one. Hint: which line adds them up, and when does it run?"
    if nearly_equal(found.flatten().sort().values, expected.flatten().sort().values):
        return "These are the right elements in another order. Hint: which rank holds which indices?"
    difference = found - expected
    for name, parameter in state.items():
        is_bias = size > 1 and parameter.shape == expected.shape[-1:]
        if is_bias and nearly_equal(difference, ((size - 1) * parameter).expand_as(expected)):
            return f"{name} is in the output {size} times. Hint: on how many ranks is it added before the sum?"
    if nearly_equal(found, expected, _IN_FLOAT32):
        return "It is close, but not as precise as float64. Hint: is anything computed or sent in float32?"
    return otherwise


def of_a_gradient(
    found: torch.Tensor, expected: torch.Tensor, every: list[torch.Tensor | None], size: int, otherwise: str
) -> str:
    """Return a hint on a wrong gradient.

    Args:
        found: The gradient on one rank.
        expected: What it should be.
        every: This gradient on all ranks that hold the whole of it.
        size: The number of ranks in the group.
        otherwise: The hint if nothing is recognized.
    """
    if found.shape != expected.shape:
        return ""
    if not found.isfinite().all():
        return "It is not finite. Hint: which of your tensors must be a constant for autograd?"
    if size > 1 and nearly_equal(found, expected * size):
        return f"It is exactly {size} times too large. Hint: on how many ranks is it complete before you add it up?"
    if size > 1 and nearly_equal(found * size, expected):
        return f"It is exactly {size} times too small. Hint: is it a sum over the ranks or a mean?"
    if len(every) > 1 and _add_up_to(every, expected):
        return "Each rank has a part of it, and the sum of the parts is right. Hint: which line adds them up?"
    if not found.any():
        return "It is all zeros. Hint: on every rank, does the autograd graph lead from the loss back to it?"
    if nearly_equal(found, expected, _IN_FLOAT32):
        return "It is close, but not as precise as float64. Hint: is anything computed or sent in float32?"
    return otherwise


def of_a_shard(held: Held, whole: torch.Tensor) -> str:
    """Return a hint on a shard whose values are wrong."""
    if held.shard.dim is not None and held.shard.tensor.shape == whole.shape:
        return "It has the shape of the whole parameter. Hint: which part of it belongs to this rank?"
    return "Hint: which indices of the whole parameter belong to this rank?"


def _add_up_to(parts: Sequence[torch.Tensor | None], expected: torch.Tensor) -> bool:
    alike = [part for part in parts if part is not None and part.shape == expected.shape]
    return len(alike) == len(parts) and nearly_equal(total_of(alike), expected)


TIMES_AS_MANY = range(2, 20)  # Drawn batches on two ranks are larger by a factor from this range.
_MOST_SLACK = 1.1  # a rank may keep a few small tensors besides its parameters


@dataclass(frozen=True)
class Trained:
    """What one group of ranks computed together, and what one process computes."""

    case: Case
    members: list[int]  # global ranks
    found: dict[int, SplitTraining]  # by global rank
    draw: Draw
    expected: list[Step]
    context: str

    def at(self, step_index: int) -> str:
        """Describe one step."""
        return f"{self.context}step {step_index + 1}"


def train(attempt: Attempt, case: Case, in_groups: bool = False, longer: bool = True) -> list[Trained]:
    """Train the student's split model on fresh data.

    Args:
        case: The model, and how to split it.
        in_groups: Whether two groups of ranks work side by side, each with a model and batches of its own. The world
            has 3 or 4 ranks then.
        longer: Whether the number of steps may be drawn. Useful if the caller judges the values of every step.

    Returns:
        What each group found.
    """
    size = attempt.world_size
    groups = [list(range(size))]
    if in_groups:
        inside = members_of(attempt, True)
        groups = [inside, [rank for rank in range(size) if rank not in inside]]
    steps = attempt.sizes.steps(STEPS) if longer else STEPS
    times = attempt.sizes.pick(1, TIMES_AS_MANY) if size == LARGE_ON and not case.has_usual_batches else 1
    draws = [Draw(attempt, case, steps, times) for _ in groups]
    per_rank: list[tuple] = [()] * size
    for members, draw in zip(groups, draws, strict=True):
        for rank in members:
            per_rank[rank] = draw.seed, draw.learning_rate, draw.batches
    message = case.context + (f"the groups {' and '.join(map(str, groups))} side by side, " if in_groups else "")
    results = attempt.run(probe_split, case, groups, per_rank=per_rank, context=message.removesuffix(", "))
    known = dict(case.build_model(0).named_parameters())
    for rank, result in enumerate(results):
        strangers = sorted(result.start.keys() - known)
        if strangers:
            raise Wrong({rank: f"{message}this rank holds {strangers[0]}, which the whole model does not have"})
    return [
        Trained(case, members, {rank: results[rank] for rank in members}, draw, one_process(case, draw), message)
        for members, draw in zip(groups, draws, strict=True)
    ]


# -- values


def judge_layout(trained: Trained) -> None:
    """Check that the ranks together hold every element of every parameter, with the right values.

    Raises:
        Wrong: If elements are missing, or a shard has another shape or other values than it should have.
    """
    whole = parameters_of(trained.case.build_model(trained.draw.seed))
    covered = {name: torch.zeros(tensor.shape, dtype=torch.bool) for name, tensor in whole.items()}
    for rank, result in trained.found.items():
        for name, held in result.start.items():
            _judge_values(rank, held, whole[name], f"{trained.context}before the first step, {name}")
            _mark(covered[name], held.shard)
    for name, elements in covered.items():
        if not elements.all():
            index = tuple((~elements).nonzero()[0].tolist())
            what = f"element {index} of {name}" if elements.any() else name
            hint = "Hint: which rank holds which indices, and does every index belong to a rank?"
            raise Wrong(f"{trained.context}no rank holds {what}", hint)


def _mark(covered: torch.Tensor, shard: Shard) -> None:
    if shard.dim is None:
        covered.fill_(True)
    else:
        covered.index_fill_(shard.dim, torch.tensor(list(shard.index), dtype=torch.long), True)


def _judge_values(rank: int, held: Held, whole: torch.Tensor, context: str) -> None:
    """Compare a shard with the same elements of the whole tensor."""
    expected = held.shard.slice_of(whole)
    found = held.shard.without_padding(held.shard.tensor)
    if not nearly_equal(found, expected):
        raise Wrong({rank: f"{context}, {first_difference(found, expected)}"}, of_a_shard(held, whole))


def judge_outputs(trained: Trained) -> None:
    """Compare the output and the loss of the first step, on every rank.

    Raises:
        Wrong: If they differ from those of one process.
    """
    _judge_outputs(trained, 0)


def _judge_outputs(trained: Trained, step_index: int) -> None:
    reference = trained.expected[step_index]
    outputs = {rank: result.steps[step_index].output for rank, result in trained.found.items()}
    outputs = {rank: output for rank, output in outputs.items() if output is not None}
    for rank, output in outputs.items():
        expected = output.slice_of(reference.output)
        if not nearly_equal(output.tensor, expected):
            message = f"{trained.at(step_index)}, the output: {first_difference(output.tensor, expected)}"
            every = [each.tensor for each in outputs.values()]
            otherwise = trained.case.hint_on_output
            hint = of_an_output(output.tensor, expected, every, reference.before, otherwise)
            raise Wrong({rank: message}, hint)
    for rank, result in trained.found.items():
        loss, expected = result.steps[step_index].loss, reference.loss
        if loss is not None and not nearly_equal(loss, expected):
            message = f"{trained.at(step_index)}, the loss is {loss.item():.10g}, expected {expected.item():.10g}"
            raise Wrong({rank: message}, trained.case.hint_on_loss)


def judge_gradients(trained: Trained) -> None:
    """Compare the gradients of the first step: of every shard, of every replicated parameter, and of the inputs.

    Raises:
        Wrong: If they differ from those of one process.
    """
    _judge_gradients(trained, 0)


def _judge_gradients(trained: Trained, step_index: int) -> None:
    reference, steps = (
        trained.expected[step_index],
        {rank: result.steps[step_index] for rank, result in trained.found.items()},
    )
    # In the order of backward, because the first wrong gradient explains the ones after it.
    for name, whole in reversed(reference.gradients.items()):
        holders = {rank: step.shards[name] for rank, step in steps.items() if name in step.shards}
        for rank, held in holders.items():
            message = f"{trained.at(step_index)}, the gradient of {name}"
            expected = None if whole is None else held.shard.slice_of(whole)
            if held.gradient is None:
                if expected is not None and expected.any():
                    raise Wrong({rank: f"{message} is None"}, HINT_ON_GRAPH)
                continue
            found = held.shard.without_padding(held.gradient)
            expected = torch.zeros_like(found) if expected is None else expected
            if not nearly_equal(found, expected):
                replicas = [each.gradient for each in holders.values() if each.shard.dim is None]
                size, otherwise = len(trained.members), trained.case.hint_on_gradient
                hint = of_a_gradient(found, expected, replicas, size, otherwise)
                raise Wrong({rank: f"{message}: {first_difference(found, expected)}"}, hint)
    if trained.case.differentiates_inputs:
        _judge_input_gradients(trained, reference, steps, step_index)


def _judge_input_gradients(trained: Trained, reference: Step, steps: dict[int, SplitStep], step_index: int) -> None:
    for rank, step in steps.items():
        found, expected = step.input_gradient, reference.input_gradient
        message = f"{trained.at(step_index)}, the gradient of the inputs"
        if found is None:
            raise Wrong({rank: f"{message} is None"}, HINT_ON_GRAPH)
        assert expected is not None  # The case differentiates the inputs.
        if not nearly_equal(found, expected):
            every = [each.input_gradient for each in steps.values()]
            size, otherwise = len(trained.members), trained.case.hint_on_gradient
            hint = of_a_gradient(found, expected, every, size, otherwise)
            raise Wrong({rank: f"{message}: {first_difference(found, expected)}"}, hint)


def judge_training(trained: Trained) -> None:
    """Compare all steps: outputs, losses, gradients, and the shards after each step.

    Raises:
        Wrong: If they differ from those of one process.
    """
    for step_index, expected in enumerate(trained.expected):
        _judge_outputs(trained, step_index)
        _judge_gradients(trained, step_index)
        for rank, result in trained.found.items():
            for name, held in result.steps[step_index].after.items():
                message = f"{trained.at(step_index)}, {name} after the step"
                _judge_values(rank, held, expected.after[name], message)


# -- the wire


def judge_traffic(trained: Trained) -> None:
    """Compare what each rank sends in each phase of a step with what the split needs.

    A collective may be made of sends and receives, or of other collectives. What counts is the bytes that a ring
    would send, and the number of messages.

    Raises:
        Wrong: If a rank sends more bytes or more messages, or if all ranks together send too few bytes.
    """
    module, size = trained.case.build_model(trained.draw.seed), len(trained.members)
    for step_index, (x, _) in enumerate(trained.draw.batches):
        calls = {rank: result.steps[step_index].calls for rank, result in trained.found.items()}
        needs = [trained.case.traffic(module, x, index, size) for index in range(size)]
        for phase in dict.fromkeys(name for each in (*needs, *calls.values()) for name in each):
            its_calls = {rank: each.get(phase, []) for rank, each in calls.items()}
            _judge_phase(its_calls, [each.get(phase, []) for each in needs], f"{trained.at(step_index)}, {phase}")


def _judge_phase(calls: dict[int, list[Call]], needs: list[list[Collective]], context: str) -> None:
    size = len(calls)
    sent = {rank: sum(wire.sent_bytes_of(call, rank) for call in own) for rank, own in calls.items()}
    for (rank, own), needed in zip(calls.items(), needs, strict=True):
        most_bytes = sum(each.sent_bytes(size) for each in needed)
        most_messages = sum(each.messages(size) for each in needed)
        kinds = ", ".join(f"{count} {each}" for each, count in Counter(needed).items()) or "none"
        message = f"{context}: {describe_calls([call for call in own if call.op != 'recv'])}; expected {kinds}"
        if sent[rank] > most_bytes * (1 + RELATIVE_TOLERANCE) + _broadcast_bytes(needed, size):
            hint = "Hint: which of these collectives sends data that a rank already has or does not need?"
            raise Wrong({rank: f"{message}. This rank sends {sent[rank]:,.0f} bytes, not {most_bytes:,.0f}"}, hint)
        if sum(_messages(call, size) for call in own) > most_messages:
            raise Wrong({rank: message}, "Hint: how many collectives does one layer need in this direction?")
    total, least = sum(sent.values()), sum(each.sent_bytes(size) for needed in needs for each in needed)
    if total < least * (1 - RELATIVE_TOLERANCE):
        message = f"{context}: all ranks together send {total:,.0f} bytes; expected {least:,.0f}"
        raise Wrong(message, "Hint: what do the ranks need from each other here, and in which dtype is it sent?")


def _broadcast_bytes(needed: list[Collective], size: int) -> float:
    """Return how many bytes above the mean a rank may send: in a broadcast, all but the last rank send everything."""
    return sum(each.nbytes - each.sent_bytes(size) for each in needed if each.op == "broadcast")


def _messages(call: Call, size: int) -> int:
    if call.op in ("send", "recv"):
        return int(call.op == "send")
    return (size - 1) * (2 if call.op.startswith("all_reduce") else 1)


# -- memory


def judge_memory(attempt: Attempt, case: Case) -> None:
    """Measure what a rank holds once the whole model is gone.

    Raises:
        Wrong: If a rank holds more than its shards or, after a step, more than its shards and their gradients.
    """
    case = case.larger()
    draw, size = Draw(attempt, case), attempt.world_size
    module = case.build_model(draw.seed)
    most = [case.most_bytes(module, index, size) for index in range(size)]
    per_rank = [(draw.seed, _MOST_SLACK * most_bytes, draw.batches) for most_bytes in most]
    for rank, held in enumerate(attempt.run(probe_memory, case, per_rank=per_rank)):
        for (moment, nbytes), times in zip(held.items(), (1, 2), strict=True):
            if nbytes > _MOST_SLACK * times * most[rank]:
                total = sum(p.nbytes for p in module.parameters())
                message = f"{moment}, this rank holds {nbytes:,} bytes; expected {times * most[rank]:,}"
                hint = "Hint: do the shards share memory with the whole model? And what else refers to it?"
                raise Wrong({rank: f"{message}. The whole model's parameters are {total:,} bytes"}, hint)
