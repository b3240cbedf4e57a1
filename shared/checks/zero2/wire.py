"""Judge what ZeRO2 sends: a reduce-scatter per bucket in every backward, an all-gather per bucket in every step."""

from dataclasses import replace

from shared.checks.engine.attempts import Attempt
from shared.checks.engine.compare import describe_calls
from shared.checks.engine.failures import Wrong
from shared.checks.engine.sharded.clip import CLIPS, clip_and_judge
from shared.checks.engine.sharded.wire import judge_rounds
from shared.checks.engine.volume import state_bytes
from shared.checks.models import awkward
from shared.checks.zero2.training import WrapperPlan, probe_zero2, train_wrapper_and_judge

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
