"""Judges of the checks explain wrong results. No ranks are needed: they judge values that are made up here."""

import random
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from shared.checks.bucketed_ddp import assignment, steps
from shared.checks.collectives import wire
from shared.checks.collectives.mixture import SPOILT, UNTOUCHED, Parts, Slot, cut, explain
from shared.checks.engine.compare import judge_gradients, judge_state
from shared.checks.engine.failures import Wrong
from shared.checks.engine.model_parallel import judges
from shared.checks.engine.model_parallel.case import Shard
from shared.checks.engine.model_parallel.probe import Held
from solutions.bucketed_ddp import MB

collectives, gradient_bucketing = pytest.mark.chapter("collectives"), pytest.mark.chapter("gradient_bucketing")

# -- chapter 01: mixtures of the ranks' chunks, turns and rounds

RANKS = (0, 1, 2, 3)
OWN = [torch.randn(20, generator=torch.Generator().manual_seed(seed)) for seed in RANKS]
PARTS = Parts({rank: cut(own, 4) for rank, own in zip(RANKS, OWN, strict=True)})
EXPECTED = Slot(1, RANKS)  # rank 1's chunk of the sum


def _sum(*taken: tuple[int, int]) -> torch.Tensor:
    return sum(PARTS.by_rank[rank][chunk] for rank, chunk in taken)


@collectives
@pytest.mark.parametrize(
    ("found", "explanation"),
    [
        (_sum(*((rank, 2) for rank in RANKS)), "chunk 2, added up over ranks 0–3, which belongs to another rank"),
        (
            _sum((0, 1), (1, 1), (3, 1)),
            "chunk 1, added up over ranks 0, 1, 3, but the contribution of rank 2 is missing",
        ),
        (_sum((0, 1), (1, 1), (1, 1), (2, 1), (3, 1)), "the contribution of rank 1 is in it twice"),
        (_sum((1, 1)), "only this rank's own chunk 1, without the other ranks'"),
        (_sum((3, 0)), "only rank 3's chunk 0, without the other ranks'"),
        (_sum((0, 3), (1, 0), (2, 1), (3, 2)), "chunk 3 of rank 0, chunk 0 of rank 1, chunk 1 of rank 2, chunk 2"),
        (PARTS.value(EXPECTED) / 4, "4 times too small: it is the mean"),
        (PARTS.value(EXPECTED).bfloat16(), "close, but not precise enough"),
        (torch.zeros(5), "all zeros"),
        (torch.full((5,), SPOILT), "after its call had returned"),
        (torch.full((5,), UNTOUCHED), "Nothing was written to it"),
        (torch.randn(5, generator=torch.Generator().manual_seed(99)), ""),
    ],
)
def test_a_wrong_result_is_explained(found, explanation):
    content, hint = explain(found, EXPECTED, PARTS, rank=1)
    assert explanation in content and bool(explanation) == bool(content)
    assert hint.startswith("Hint: ") and hint.endswith("?")


@collectives
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_sums_in_any_order_stay_within_the_tolerance_and_a_lower_precision_does_not(dtype):
    own = [torch.randn(4000, generator=torch.Generator().manual_seed(seed)).to(dtype) for seed in RANKS]
    parts, slot = Parts({rank: [tensor] for rank, tensor in enumerate(own)}), Slot(0, RANKS)
    within = parts.tolerance(slot)
    for order in ([0, 1, 2, 3], [3, 1, 0, 2], [2, 3, 1, 0]):
        total = sum((own[rank] for rank in order[1:]), own[order[0]])
        assert ((total.double() - parts.value(slot)).abs() <= within).all()
    lower = torch.bfloat16 if dtype == torch.float32 else torch.float8_e4m3fn
    assert not ((parts.value(slot).to(lower).double() - parts.value(slot)).abs() <= within).all()


@collectives
def test_chunks_cover_a_tensor_and_are_padded():
    assert [chunk.tolist() for chunk in cut(torch.arange(5), 4)] == [[0, 1], [2, 3], [4, 0], [0, 0]]
    assert [chunk.numel() for chunk in cut(torch.arange(0), 3)] == [0, 0, 0]


@collectives
def test_turns_are_counted_as_if_each_call_waited():
    def ring(size, send_first):
        send, recv = (lambda r: ("send", (r + 1) % size)), (lambda r: ("recv", (r - 1) % size))
        return [[send(r), recv(r)] if r in send_first else [recv(r), send(r)] for r in range(size)]

    assert wire.count_turns(ring(4, {0, 2})) == 2
    assert wire.count_turns(ring(3, {0, 2})) == 3
    assert wire.count_turns(ring(4, {0})) == 4
    assert wire.count_turns(ring(4, {0, 1, 2, 3})) is None and wire.count_turns(ring(2, set())) is None


@collectives
def test_rounds_are_counted_as_if_a_rank_sent_one_message_in_each():
    def sends(**partners):
        return {r: [SimpleNamespace(partner=p) for p in partners.get(f"rank_{r}", [])] for r in range(4)}

    assert wire.count_rounds(sends(rank_0=[1, 2], rank_1=[3]), src=0) == 2
    assert wire.count_rounds(sends(rank_0=[1, 2, 3]), src=0) == 3
    assert wire.count_rounds(sends(rank_2=[3], rank_3=[0], rank_0=[1]), src=2) == 3


# -- gradients

GRADIENTS = {rank: torch.tensor([1.0, -2.0, 4.0], dtype=torch.float64) * (3 * rank + 1) for rank in range(3)}
MEAN = sum(GRADIENTS.values()) / 3
NONE_ON_1 = GRADIENTS | {1: None}


@pytest.mark.parametrize(
    ("found", "own", "hint"),
    [
        (MEAN * 3 / 4, GRADIENTS, "the sum over 3 ranks, divided by 4. Hint: over how many ranks"),
        (GRADIENTS[0] / 3, GRADIENTS, "is .grad the tensor that holds the result?"),
        (MEAN * 3 / 2, NONE_ON_1, "Before, it was None on rank 1. Hint: over how many ranks is the mean?"),
        (MEAN * 1.25, GRADIENTS, "It is 1.25 times what it should be."),
        (None, dict.fromkeys(GRADIENTS), "which module does forward() run?"),
        (torch.tensor([5.0, 7.0, 1.0], dtype=torch.float64), NONE_ON_1, "This gradient is None on rank 1."),
    ],
)
def test_the_cause_of_a_wrong_gradient_is_recognized(found, own, hint):
    gradients, local = ({rank: {"weight": value(rank)} for rank in own} for value in (lambda _: found, own.get))
    with pytest.raises(Wrong) as caught:
        judge_gradients(gradients, {"weight": MEAN}, local, "a model")
    assert hint in caught.value.hint


def test_a_rank_that_keeps_its_own_state_is_recognized():
    states = {rank: {"weight": GRADIENTS[rank]} for rank in (0, 1)}
    with pytest.raises(Wrong) as caught:
        judge_state(states, states[0], 0, states)
    assert "still this rank's own value" in caught.value.hint


@pytest.mark.parametrize(("missing", "hint"), [([1], "is the slice set to zero there?"), ([], "or added to it?")])
def test_old_value_of_a_slice_is_recognized(missing, hint):
    own = {rank: {"weight": None if rank in missing else GRADIENTS[rank]} for rank in GRADIENTS}
    held = torch.tensor([0.5, 0.25, 8.0], dtype=torch.float64)
    found = {"weight": MEAN + (len(missing) or len(GRADIENTS)) * held}
    before = {rank: {"weight": held} for rank in GRADIENTS}
    assert hint in steps._left_over(dict.fromkeys(GRADIENTS, found), {"weight": MEAN}, before, own)


# -- split models. Mutants of chapters 13 and 15 show which check finds what.

SPLIT = pytest.mark.chapter("tensor_parallel", "pipeline_parallel")
OUTPUT = torch.tensor([[1.0, -2.0], [4.0, 3.0]], dtype=torch.float64) / 3
BIAS = torch.tensor([0.5, 2.0], dtype=torch.float64)


@SPLIT
@pytest.mark.parametrize(
    ("every", "hint"),
    [
        ([OUTPUT[None]] * 2, "along which dimension are the ranks' outputs concatenated?"),
        ([OUTPUT / 2] * 2, "It is exactly 2 times too small"),
        ([OUTPUT - 1, torch.ones_like(OUTPUT)], "The ranks' outputs add up to the right one"),
        ([OUTPUT.flip(0)] * 2, "in another order"),
        ([OUTPUT + BIAS] * 2, "bias is in the output 2 times"),
        ([OUTPUT.float().double()] * 2, "not as precise as float64"),
        ([OUTPUT + 1] * 2, "otherwise"),
    ],
)
def test_the_cause_of_a_wrong_output_is_recognized(every, hint):
    assert hint in judges.of_an_output(every[0], OUTPUT, every, {"bias": BIAS}, "otherwise")


@SPLIT
@pytest.mark.parametrize(
    ("every", "hint"),
    [
        ([OUTPUT / 0] * 2, "It is not finite"),
        ([OUTPUT * 2] * 2, "It is exactly 2 times too large"),
        ([OUTPUT / 2] * 2, "It is exactly 2 times too small"),
        ([OUTPUT - 1, torch.ones_like(OUTPUT)], "Each rank has a part of it"),
        ([0 * OUTPUT] * 2, "It is all zeros"),
        ([OUTPUT.float().double()] * 2, "not as precise as float64"),
        ([OUTPUT - 1, None], "otherwise"),
    ],
)
def test_the_cause_of_a_wrong_gradient_of_a_split_model_is_recognized(every, hint):
    assert hint in judges.of_a_gradient(every[0], OUTPUT, every, 2, "otherwise")


@SPLIT
@pytest.mark.parametrize(("dim", "hint"), [(0, "which part of it belongs"), (None, "which indices")])
def test_a_shard_that_is_the_whole_parameter_is_recognized(dim, hint):
    assert hint in judges.of_a_shard(Held(Shard(OUTPUT, dim, (0, 1)), None), OUTPUT)


# -- chapter 03: assign_buckets


def wrong_in(judge, assign_buckets) -> Wrong:
    """Run a check on a function in this process. Returns the error that it raises."""
    attempt = SimpleNamespace(random=random.Random(0), run=lambda probe, cases: [probe(assign_buckets, cases)])
    with pytest.raises(Wrong) as caught:
        judge(attempt)
    return caught.value


def assigned(
    parameters, caps_mb: tuple[float, float], itemsize: int = 0, one_first: bool = False
) -> list[list[nn.Parameter]]:
    """Assign parameters to buckets, with one of a student's mistakes. The caps are (first bucket, other buckets)."""
    buckets, last = [], {}
    for parameter in reversed(parameters):
        key = (parameter.dtype, parameter.device)
        bucket, room_bytes = last.get(key, (None, 0))
        nbytes = parameter.numel() * (itemsize or parameter.itemsize)
        if bucket is None or nbytes > room_bytes:
            is_first = not buckets if one_first else bucket is None
            bucket, room_bytes = [], caps_mb[0 if is_first else 1] * MB
            buckets.append(bucket)
        bucket.append(parameter)
        last[key] = bucket, room_bytes - nbytes
    return buckets


def one_cap(parameters, bucket_cap_mb=25.0, first_bucket_mb=1.0):
    return assigned([p for p in parameters if p.requires_grad], (bucket_cap_mb, bucket_cap_mb))


@gradient_bucketing
def test_a_function_that_does_not_use_the_first_cap_yet_is_not_asked_about_bytes():
    wrong = wrong_in(assignment.the_first_bucket_is_smaller, one_cap)
    assert wrong.hint == "Hint: how large may the first bucket be?"
    wrong = wrong_in(assignment.a_bucket_has_one_dtype_and_device, one_cap)
    assert wrong.hint == "Hint: how large may the first bucket of each dtype and device be?"


@gradient_bucketing
def test_elements_of_four_bytes_are_asked_about_in_the_first_line_and_in_the_second():
    def assign_buckets(parameters, bucket_cap_mb=25.0, first_bucket_mb=1.0):
        return assigned(parameters, (min(first_bucket_mb, bucket_cap_mb), bucket_cap_mb), itemsize=4)

    for judge in (assignment.parameters_fill_buckets, assignment.the_first_bucket_is_smaller):
        assert wrong_in(judge, assign_buckets).hint == "Hint: how many bytes does an element have here?"


@gradient_bucketing
def test_a_generator_that_is_used_twice_is_hinted_at():
    def assign_buckets(parameters, bucket_cap_mb=25.0, first_bucket_mb=1.0):
        trainable = [p for p in parameters if p.requires_grad]
        return one_cap(trainable, bucket_cap_mb) if len(list(parameters)) else []

    wrong = wrong_in(assignment.any_iterable_will_do, assign_buckets)
    assert "given as a generator" in wrong.evidence and wrong.hint.endswith("go through a generator twice?")


@gradient_bucketing
def test_one_first_bucket_for_all_dtypes_is_hinted_at():
    def assign_buckets(parameters, bucket_cap_mb=25.0, first_bucket_mb=1.0):
        return assigned(parameters, (min(first_bucket_mb, bucket_cap_mb), bucket_cap_mb), one_first=True)

    wrong = wrong_in(assignment.a_bucket_has_one_dtype_and_device, assign_buckets)
    assert wrong.hint == "Hint: how large may the first bucket of each dtype and device be?"


@gradient_bucketing
def test_a_bucket_that_another_dtype_closes_is_not_taken_for_a_wrong_first_cap():
    def assign_buckets(parameters, bucket_cap_mb=25.0, first_bucket_mb=1.0):
        buckets, kinds, room_bytes, kind = [], set(), 0, None
        for parameter in reversed(parameters):
            if parameter.dtype != kind or parameter.nbytes > room_bytes:
                cap_mb = bucket_cap_mb if parameter.dtype in kinds else min(first_bucket_mb, bucket_cap_mb)
                room_bytes, kind = cap_mb * MB, parameter.dtype
                kinds.add(kind)
                buckets.append([])
            buckets[-1].append(parameter)
            room_bytes -= parameter.nbytes
        return buckets

    wrong = wrong_in(assignment.a_bucket_has_one_dtype_and_device, assign_buckets)
    assert "which parameters may still be added" in wrong.hint
