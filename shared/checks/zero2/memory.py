"""Judge how much memory a rank holds with ZeRO2: at rest, between backward and step, and during backward.

There are three counts, because each sees something that the others miss. Between calls, the first adds up every tensor
that lives on this rank, in whichever attribute, closure or list it is kept. The second finds objects that are not
tensors but may hold the values of one. During backward, the third follows every storage that an operator allocates.
"""

import contextlib
import time
from dataclasses import replace
from itertools import pairwise

import torch
from torch import nn

from shared import memory
from shared.checks.engine.attempts import Attempt
from shared.checks.engine.buckets import MB
from shared.checks.engine.candidate import device_here
from shared.checks.engine.compare import describe_calls
from shared.checks.engine.failures import Wrong
from shared.checks.engine.footprint import hidden_bytes, ignore_existing_objects, living_bytes, state_bytes
from shared.checks.engine.overlap_models import Chain
from shared.checks.engine.sharded.clip import CLIPS, clip_and_judge
from shared.checks.engine.sharded.wire import judge_rounds
from shared.checks.models import awkward
from shared.checks.zero2.training import WrapperPlan, probe_zero2, train_wrapper_and_judge
from shared.deadlines import scaled

# -- judge what ZeRO2 sends: a reduce-scatter per bucket in every backward, an all-gather per bucket in every step


_AGAIN = "A whole synchronization is repeated. Hint: how does step() know that gradients are already synchronized?"


def each_backward_and_each_step_send_once(attempt: Attempt) -> None:
    plans = [WrapperPlan("Frozen", "SGD"), WrapperPlan("Mixed"), WrapperPlan("Crowd")]
    plans.append(WrapperPlan("Tied", bucket_cap_mb=25.0))
    for drawn in attempt.random.sample(plans, 2):
        plan = replace(drawn, steps=2)
        _judge_building(found := train_wrapper_and_judge(attempt, plan), plan)
        for number in range(plan.steps):
            steps = {rank: result["steps"][number] for rank, result in found.items()}
            context = f"{plan}, step {number + 1}"
            _reject({rank: step["zero_grad"] for rank, step in steps.items()}, f"{context}, in zero_grad()")
            sent = {rank: step["sent"][0] for rank, step in steps.items()}
            judge_rounds(sent, plan.buckets(), 1, f"{context}, backward() and finish_gradient_sync()")
            stepping = {rank: step["step"] for rank, step in steps.items()}
            judge_rounds(stepping, plan.buckets(), 1, f"{context}, step()", _AGAIN)


def a_step_that_finishes_sends_once(attempt: Attempt) -> None:
    """Try a loop that calls finish_gradient_sync(), and one in which step() must finish."""
    for finishes in (True, False):
        plan = WrapperPlan("Plain", steps=2, finishes=finishes)
        found = train_wrapper_and_judge(attempt, plan)
        for number in range(plan.steps):
            steps = {rank: result["steps"][number] for rank, result in found.items()}
            both = {rank: step["sent"][0] + step["step"] for rank, step in steps.items()}
            judge_rounds(both, plan.buckets(), 2, f"{plan}, step {number + 1}, backward() and step()", _AGAIN)


def micro_batches_send_or_are_silent(attempt: Attempt) -> None:
    """Reduce all micro-batches, or only the last one when the others are inside no_sync()."""
    for sends_each in (True, False):
        plan = WrapperPlan("Frozen", "SGD", steps=2, micro_batches=3, sends_each=sends_each)
        found = train_wrapper_and_judge(attempt, plan)
        for number in range(plan.steps):
            steps, context = {rank: each["steps"][number] for rank, each in found.items()}, f"{plan}, step {number + 1}"
            silent = {rank: [call for calls in step["silent"] for call in calls] for rank, step in steps.items()}
            _reject(
                silent,
                f"{context}, inside no_sync()",
                "Hint: which line launches the collective, and does it check whether no_sync() is active?",
            )
            for index in range(len(steps[min(steps)]["sent"])):
                sent = {rank: step["sent"][index] for rank, step in steps.items()}
                judge_rounds(sent, plan.buckets(), 1, f"{context}, micro-batch {index + 1} of those that are reduced")
            stepping = {rank: step["step"] for rank, step in steps.items()}
            judge_rounds(stepping, plan.buckets(), 1, f"{context}, step()", _AGAIN)


def _judge_building(found: dict[int, dict], plan: WrapperPlan) -> None:
    padding = sum(flat.filled_bytes(len(found)) - flat.nbytes for flat in plan.buckets())
    for rank, result in found.items():
        if sum(call.payload_bytes for call in result["building"]) > state_bytes(plan.model) + padding:
            context = f"{plan}, in the constructor: {describe_calls(result['building'])}"
            expected = f"expected at most {state_bytes(plan.model) + padding} bytes"
            raise Wrong(
                {rank: f"{context}; {expected}"}, "Hint: how many times is each parameter and each buffer sent?"
            )


def _reject(calls: dict[int, list], context: str, hint: str = "") -> None:
    wrong = {rank: f"{context}: {describe_calls(own)}; expected none" for rank, own in calls.items() if own}
    if wrong:
        raise Wrong(wrong, hint)


def clipping_sends_one_more_element(attempt: Attempt) -> None:
    for finishes in (True, False):
        plan = WrapperPlan("Frozen", "SGD", steps=2, max_norm=CLIPS, finishes=finishes)
        found = clip_and_judge(attempt, plan, probe_zero2)
        for number in range(plan.steps):
            rest = {}
            for rank, result in found.items():
                step = result["steps"][number]
                small = [call for call in step["clip"] if call.op == "all_reduce" and call.payload_bytes <= 8]
                if len(small) != 1:
                    context = f"{plan}: {describe_calls(step['clip'])} in clip_grad_norm_()"
                    expected = "expected one all_reduce of one element besides the reduce-scatters that are left"
                    raise Wrong(
                        {rank: f"{context}; {expected}"},
                        "Hint: which values can each rank add up before it sends them?",
                    )
                rest[rank] = [call for call in step["clip"] if call is not small[0]] + step["sent"][0] + step["step"]
            context = f"{awkward.describe(plan.model)}, step {number + 1}, clipped"
            judge_rounds(rest, plan.buckets(), 2, context, _AGAIN)


LAYERS, WIDTH, SAMPLES = 48, 64, 2
WIDTHS = (awkward.INPUTS, *[WIDTH] * LAYERS, awkward.OUTPUTS)
LAYER_BYTES = 4 * (WIDTH + 1) * WIDTH
CAP_BYTES = 4 * LAYER_BYTES
SLACK = 1.01  # padding, Adam's step counters, inputs
_SETTLES_WITHIN_S = scaled(1.0)  # gloo's threads release a message's tensor a little after the message is complete
TRIES = 3  # for that reason, a peak that is too high is measured again, and the lowest one counts
REST, REDUCED = "after zero_grad() without a step", "after finish_gradient_sync()"


def numel() -> int:
    return sum((before + 1) * after for before, after in pairwise(WIDTHS))


def probe_memory(zero2, most_bytes: dict[str, float] | None, seed: int) -> dict:
    """Train with Adam. Return the bytes held at each moment, and by component.

    Args:
        zero2: The student's class.
        most_bytes: The limit at each moment, or None to measure the additional bytes at each backward's peak instead.
        seed: For the samples.
    """
    ignore_existing_objects()
    return _train(zero2, most_bytes, seed)


def _train(zero2, most_bytes: dict[str, float] | None, seed: int) -> dict:
    draw = torch.Generator().manual_seed(seed)
    x = torch.randn(SAMPLES, awkward.INPUTS, generator=draw).to(device_here())
    y = torch.randn(SAMPLES, awkward.OUTPUTS, generator=draw).to(device_here())
    before_bytes, found = living_bytes(), {"held": {}, "peaks": []}
    module = Chain(WIDTHS).to(device_here())
    wrapped = zero2(module, torch.optim.Adam, bucket_cap_mb=CAP_BYTES / MB, lr=0.01)

    def note(when: str) -> None:
        began_s, held_bytes = time.perf_counter(), living_bytes() - before_bytes
        while most_bytes and held_bytes > most_bytes[when] and time.perf_counter() - began_s < _SETTLES_WITHIN_S:
            time.sleep(0.01)
            held_bytes = min(held_bytes, living_bytes() - before_bytes)
        found["held"][when] = held_bytes

    def backward() -> None:
        nn.functional.mse_loss(wrapped(x), y).backward()
        wrapped.finish_gradient_sync()

    for _ in range(2):
        with memory.peak(wrapped, wrapped) if most_bytes is None else contextlib.nullcontext() as peak:
            backward()
        if peak is not None:
            grown = [sample.held.total_bytes - sample.held.activations_bytes for sample in peak.samples]
            found["peaks"].append(max(grown) - grown[0])
            found["links"] = _links_of(wrapped)
        wrapped.step()
        wrapped.zero_grad()
    if most_bytes is None:
        return found
    backward()
    note(REDUCED)
    wrapped.zero_grad()  # without a step, which would drop the shards' gradients, too
    note(REST)
    found |= {"components": memory.held(wrapped, wrapped).by_component(), "hidden": hidden_bytes()}
    return found


def _links_of(wrapped) -> str:
    """Describe the first bucket whose `previous` is not the bucket before it in `buckets`, or return ""."""
    buckets = list(getattr(wrapped, "buckets", []))
    index_of = {id(bucket): f"buckets[{index}]" for index, bucket in enumerate(buckets)} | {id(None): "None"}
    for index, bucket in enumerate(buckets):
        found = getattr(bucket, "previous", None)
        if found is not (buckets[index - 1] if index else None):
            expected = f"buckets[{index - 1}]" if index else "None"
            return f"buckets[{index}].previous is {index_of.get(id(found), 'another object')}; expected {expected}"
    return ""


def _seeds(attempt: Attempt) -> list[tuple[int]]:
    return [(attempt.draw_seed(),) for _ in range(attempt.world_size)]


def each_rank_holds_its_shards(attempt: Attempt) -> None:
    rest = numel() * (4 + 8 / attempt.world_size)
    expected = {REST: rest, REDUCED: rest + 4 * numel() / attempt.world_size}
    most = {when: SLACK * nbytes for when, nbytes in expected.items()}
    found = attempt.run(probe_memory, most, per_rank=_seeds(attempt))
    context = f"{numel():,} float32 parameters, Adam, {attempt.world_size} ranks"
    for rank, result in enumerate(found):
        state_bytes = 8 * numel() / attempt.world_size
        named = ", ".join(f"{name} {held:,}" for name, held in result["components"].items() if held)
        if result["components"]["optimizer"] > SLACK * state_bytes:
            evidence = f"the optimizer holds {result['components']['optimizer']:,} bytes; expected {state_bytes:,.0f}"
            raise Wrong({rank: f"{context}: {evidence}"}, "Hint: which parameters does the inner optimizer get?")
        for when in (REST, REDUCED):
            if (held_bytes := result["held"][when]) > most[when]:
                evidence = f"{when}, {held_bytes:,} bytes are held; expected at most {expected[when]:,.0f}"
                raise Wrong({rank: f"{context}: {evidence}. At rest, by component: {named}"}, _why(when, result))
        if result["hidden"] > (SLACK - 1) * expected[REST]:
            evidence = (
                f"{result['hidden']:,} bytes are in NumPy arrays, bytes objects or storages rather than "
                "tensors; expected none"
            )
            raise Wrong(
                {rank: f"{context}: {evidence}"},
                "Hint: which values do these objects hold, and does this rank need them?",
            )
        if result["held"][REST] < expected[REST] / SLACK:
            evidence = (
                f"{result['held'][REST]:,} bytes are in tensors, but the parameters and this rank's state need "
                f"{expected[REST]:,.0f}"
            )
            raise Wrong({rank: f"{context}: {evidence}"}, "Hint: where is this rank's shard of the optimizer state?")


def _why(when: str, result: dict) -> str:
    if when == REST and result["components"]["gradients"]:
        return "Hint: which gradients still exist after zero_grad(), and is any of them needed?"
    if when == REDUCED:
        return "Hint: what remains of a bucket after wait(), and is it a view of a larger tensor?"
    return "Hint: which tensors exist twice, and what keeps them alive?"


def backward_holds_three_buckets(attempt: Attempt) -> None:
    """Allow, besides the shards, the bucket in flight, its receive buffer, the bucket being packed and one gradient."""
    most = SLACK * (4 * numel() / attempt.world_size + 3 * CAP_BYTES + LAYER_BYTES)
    peaks = [float("inf")] * attempt.world_size
    for _ in range(TRIES):
        found = attempt.run(probe_memory, None, per_rank=_seeds(attempt))
        peaks = [min(least, *each["peaks"]) for least, each in zip(peaks, found, strict=True)]
        if max(peaks) <= most:
            return
    for rank, peak_bytes in enumerate(peaks):
        if peak_bytes > most:
            buckets = -(-4 * numel() // CAP_BYTES)
            shards_bytes = 4 * numel() // attempt.world_size
            evidence = (
                f"{buckets} buckets of {CAP_BYTES:,} bytes on {attempt.world_size} ranks: at its peak, backward holds "
                f"{peak_bytes:,} bytes more than before it; expected at most {most / SLACK:,.0f}: {shards_bytes:,} for "
                f"this rank's shards of the gradients, {3 * CAP_BYTES:,} for three buckets, and {LAYER_BYTES:,} for "
                "one gradient"
            )
            hint = "Hint: which gradients and flat tensors are alive then, and what is each of them waiting for?"
            if links := found[rank]["links"]:
                evidence += f". {links}"
                hint = "Hint: which bucket is launched before this one?"
            raise Wrong({rank: evidence}, hint)
