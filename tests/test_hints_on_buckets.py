"""The hints of `assign_buckets` name the rule that was broken. No ranks are needed."""

import random
from types import SimpleNamespace

import pytest
from torch import nn

from shared.checks.bucketed_ddp import assignment
from shared.checks.engine.failures import Wrong
from solutions.bucketed_ddp import MB

pytestmark = pytest.mark.chapter("gradient_bucketing")


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


def test_a_function_that_does_not_use_the_first_cap_yet_is_not_asked_about_bytes():
    wrong = wrong_in(assignment.the_first_bucket_is_smaller, one_cap)
    assert wrong.hint == "Hint: how large may the first bucket be?"
    wrong = wrong_in(assignment.a_bucket_has_one_dtype_and_device, one_cap)
    assert wrong.hint == "Hint: how large may the first bucket of each dtype and device be?"


def test_elements_of_four_bytes_are_asked_about_in_the_first_line_and_in_the_second():
    def assign_buckets(parameters, bucket_cap_mb=25.0, first_bucket_mb=1.0):
        return assigned(parameters, (min(first_bucket_mb, bucket_cap_mb), bucket_cap_mb), itemsize=4)

    for judge in (assignment.parameters_fill_buckets, assignment.the_first_bucket_is_smaller):
        assert wrong_in(judge, assign_buckets).hint == "Hint: how many bytes does an element have here?"


def test_a_generator_that_is_used_twice_is_hinted_at():
    def assign_buckets(parameters, bucket_cap_mb=25.0, first_bucket_mb=1.0):
        trainable = [p for p in parameters if p.requires_grad]
        return one_cap(trainable, bucket_cap_mb) if len(list(parameters)) else []

    wrong = wrong_in(assignment.any_iterable_will_do, assign_buckets)
    assert "given as a generator" in wrong.evidence and wrong.hint.endswith("go through a generator twice?")


def test_one_first_bucket_for_all_dtypes_is_hinted_at():
    def assign_buckets(parameters, bucket_cap_mb=25.0, first_bucket_mb=1.0):
        return assigned(parameters, (min(first_bucket_mb, bucket_cap_mb), bucket_cap_mb), one_first=True)

    wrong = wrong_in(assignment.a_bucket_has_one_dtype_and_device, assign_buckets)
    assert wrong.hint == "Hint: how large may the first bucket of each dtype and device be?"


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
