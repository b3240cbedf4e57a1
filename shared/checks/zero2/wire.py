"""What ZeRO2 may send: with every backward each bucket's sum, with every step each bucket's parameters, and no more."""

from dataclasses import replace

from shared.checks.engine.compare import describe_calls
from shared.checks.engine.framework import Attempt, Wrong
from shared.checks.engine.sharded.clip import CLIPS, clip_and_judge
from shared.checks.engine.sharded.wire import judge_rounds
from shared.checks.engine.volume import state_bytes
from shared.checks.models import awkward
from shared.checks.zero2.training import Travel, probe_zero2, travel_and_judge

_AGAIN = "That is a whole round more. Look at: was the synchronisation already done?"


def each_backward_sends_once(attempt: Attempt) -> None:
    plans = [Travel("Frozen", "SGD"), Travel("Mixed"), Travel("Crowd"), Travel("Tied", bucket_cap_mb=25.0)]
    for plan in (*attempt.random.sample(plans, 2), Travel("Plain", finishes=False)):
        plan = replace(plan, steps=2)
        _judge_building(found := travel_and_judge(attempt, plan), plan)
        for number in range(plan.steps):
            steps = {rank: result["steps"][number] for rank, result in found.items()}
            said = f"{plan}, step {number + 1}"
            _refuse({rank: step["zero_grad"] for rank, step in steps.items()}, f"{said}, in zero_grad()")
            if plan.finishes:
                sent = {rank: step["sent"][0] for rank, step in steps.items()}
                judge_rounds(sent, plan.buckets(), 1, f"{said}, backward() and finish_gradient_sync()")
                stepping = {rank: step["step"] for rank, step in steps.items()}
                judge_rounds(stepping, plan.buckets(), 1, f"{said}, step()", _AGAIN)
            else:
                both = {rank: step["sent"][0] + step["step"] for rank, step in steps.items()}
                judge_rounds(both, plan.buckets(), 2, f"{said}, backward() and step()", _AGAIN)


def micro_batches_send_or_are_silent(attempt: Attempt) -> None:
    """g micro-batches: (g+1) rounds where each sends, 2 where all but the last are inside no_sync()."""
    for sends_each in (True, False):
        plan = Travel("Frozen", "SGD", steps=2, micro_batches=3, sends_each=sends_each)
        found = travel_and_judge(attempt, plan)
        for number in range(plan.steps):
            steps, said = {rank: each["steps"][number] for rank, each in found.items()}, f"{plan}, step {number + 1}"
            silent = {rank: [call for calls in step["silent"] for call in calls] for rank, step in steps.items()}
            _refuse(silent, f"{said}, inside no_sync()", "Look at: who sends, and does it know of no_sync()?")
            for place in range(len(steps[min(steps)]["sent"])):
                sent = {rank: step["sent"][place] for rank, step in steps.items()}
                judge_rounds(sent, plan.buckets(), 1, f"{said}, the micro-batches that send, number {place + 1}")
            stepping = {rank: step["step"] for rank, step in steps.items()}
            judge_rounds(stepping, plan.buckets(), 1, f"{said}, step()", _AGAIN)


def _judge_building(found: dict[int, dict], plan: Travel) -> None:
    filled = sum(flat.filled_bytes(len(found)) - flat.nbytes for flat in plan.buckets())
    for rank, result in found.items():
        if sum(call.payload_bytes for call in result["building"]) > state_bytes(plan.model) + filled:
            said = f"{plan}, when it is built: {describe_calls(result['building'])}"
            expected = f"expected at most {state_bytes(plan.model) + filled} bytes"
            raise Wrong({rank: f"{said}; {expected}"}, "Look at: is each parameter and each buffer sent once?")


def _refuse(calls: dict[int, list], context: str, hint: str = "") -> None:
    wrong = {rank: f"{context}: {describe_calls(own)}; expected none" for rank, own in calls.items() if own}
    if wrong:
        raise Wrong(wrong, hint)


def clipping_sends_one_number_more(attempt: Attempt) -> None:
    for finishes in (True, False):
        plan = Travel("Frozen", "SGD", steps=2, max_norm=CLIPS, finishes=finishes)
        found = clip_and_judge(attempt, plan, probe_zero2)
        for number in range(plan.steps):
            rest = {}
            for rank, result in found.items():
                step = result["steps"][number]
                small = [call for call in step["clip"] if call.op == "all_reduce" and call.payload_bytes <= 8]
                if len(small) != 1:
                    said = f"{plan}: {describe_calls(step['clip'])} in clip_grad_norm_()"
                    expected = "expected one all_reduce of one number besides what is left of the gradients'"
                    raise Wrong({rank: f"{said}; {expected}"}, "Look at: which numbers can be put together before?")
                rest[rank] = [call for call in step["clip"] if call is not small[0]] + step["sent"][0] + step["step"]
            said = f"{awkward.said(plan.model)}, step {number + 1}, clipped"
            judge_rounds(rest, plan.buckets(), 2, said, _AGAIN)
