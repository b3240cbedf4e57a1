"""Checks for chapter 19: gradient compressors for OverlappedDDP.

A check draws the gradients that each rank has in each step, so it knows what every rank should get: exactly for TopK
and PowerSGD, and for Int8 up to the rounding that its scales allow. Only one check of a compressor trains a network.
"""

from collections.abc import Callable
from dataclasses import replace

import torch

from shared.checks.compression import feedback, quantizing, references
from shared.checks.compression.feeding import Setting, counted
from shared.checks.compression.hints import Steps
from shared.checks.compression.judging import (
    draw_steps,
    feed,
    judge_equal_buckets,
    judge_frozen,
    judge_nothing_lost,
    judge_result,
    judge_rounded_once,
    judge_same_bits,
    judge_two_models,
    judge_wire,
    judge_within_group,
    without_gradients,
)
from shared.checks.compression.references import Method
from shared.checks.engine.attempts import Attempt
from shared.checks.engine.failures import Wrong
from shared.checks.engine.framework import Exercise

quantize = Exercise("19.1a", "quantize")
dequantize = Exercise("19.1b", "dequantize")
CompressedBucket = Exercise("19.2", "CompressedBucket")
Int8 = Exercise("19.3", "Int8", first="one bucket")
TopK = Exercise("19.4", "TopK", first="one bucket")
PowerSGD = Exercise("19.5", "PowerSGD", first="one bucket")

# Lab 03's Bucket may divide in wait(), but a compressor must get gradients that are divided.
EARLIER_PIECES = {"Bucket": "bucketed_ddp"}
KIB = 2**10 / 2**20  # in MB


# -- 19.1 and 19.2

quantize.check("random values", world_sizes=(1,))(quantizing.random_values_are_quantized)
quantize.check("awkward blocks", world_sizes=(1,))(quantizing.awkward_blocks_are_quantized)
dequantize.check("values", world_sizes=(1,))(quantizing.values_are_dequantized)
CompressedBucket.check("order", world_sizes=(1,))(feedback.handles_are_waited_for_in_order)
CompressedBucket.check("unsent", world_sizes=(2,))(feedback.what_is_unsent_is_sent_later)
CompressedBucket.check("buckets", world_sizes=(2, 3))(feedback.several_buckets_and_groups)


# -- 19.3 to 19.5


def plain(attempt: Attempt, method: Method) -> Setting:
    """Return one bucket with two matrices and their biases."""
    width = attempt.sizes.pick(23, range(12, 400))
    return Setting(((width, 17), (width,), (19, width), (19,)), method.arguments)


def awkward(attempt: Attempt, method: Method, **options) -> Setting:
    """Return parameters of all kinds in several buckets: scalars, vectors, matrices, and one of four dimensions."""
    width = attempt.sizes.pick(14, range(12, 200))
    shapes = ((width, 31), (), (7, 1), (width, 11), (1, 9), (12, 3, 2, 3), (40,), (1,), (width, 13), (9, 10))
    return Setting(shapes, method.arguments, cap_mb=4 * KIB, **options)


def register(exercise: Exercise, usual: Method, draw_method: Callable[[Attempt], Method]) -> None:
    """Register the checks that all compressors must pass.

    Args:
        usual: The compressor that the first checks try. It is one with which most mistakes show.
        draw_method: Draws another one.
    """

    @exercise.check("one bucket", world_sizes=(2,))
    def one_bucket_is_right(attempt: Attempt) -> None:
        setting = plain(attempt, usual)
        judge_result(feed(attempt, usual, setting, draw_steps(attempt, usual, setting, 1)))

    @exercise.check("same bits", world_sizes=(2, 3, 4))
    def all_ranks_get_the_same_bits(attempt: Attempt) -> None:
        for dtype in (torch.float32, torch.bfloat16):
            setting = replace(plain(attempt, usual), dtype=dtype)
            judge_same_bits(feed(attempt, usual, setting, draw_steps(attempt, usual, setting, 3)))

    @exercise.check("steps")
    def several_steps_are_right(attempt: Attempt) -> None:
        for method in {usual, draw_method(attempt)}:
            setting = plain(attempt, method)
            count = attempt.sizes.steps(12)
            judge_result(feed(attempt, method, setting, draw_steps(attempt, method, setting, count)))

    @exercise.check("nothing is lost", world_sizes=(2, 3, 4))
    def what_is_unsent_comes_later(attempt: Attempt) -> None:
        method = draw_method(attempt)
        if attempt.world_size == 4 and method == references.PowerSGD(1):
            method = usual  # PowerSGD(1) would send mostly headers
        setting = awkward(attempt, method)
        steps = draw_steps(attempt, method, setting, began := 4)
        steps += without_gradients(setting, attempt.world_size, method.drains_within(setting))
        judge_nothing_lost(feed(attempt, method, setting, steps), began)

    @exercise.check("wire")
    def the_bytes_are_what_the_formula_says(attempt: Attempt) -> None:
        method = draw_method(attempt)
        in_bf16 = replace(plain(attempt, method), dtype=torch.bfloat16, said="in bfloat16")
        for setting in (plain(attempt, method), in_bf16, awkward(attempt, method, dtype=torch.float32)):
            judge_wire(feed(attempt, method, setting, draw_steps(attempt, method, setting, 2, micro_batches=2)))

    @exercise.check("parameters", world_sizes=(2, 4))
    def parameters_of_all_kinds(attempt: Attempt) -> None:
        """Try frozen parameters, and some that a rank, or all ranks, use only in some steps, and accumulation."""
        method = draw_method(attempt)
        for set_to_none in (True, False):
            setting = awkward(attempt, method, frozen=(3, 6), set_to_none=set_to_none, said="some parameters unused")
            steps = draw_steps(attempt, method, setting, 5, 1 + 2 * set_to_none, _unused)
            tried = feed(attempt, method, setting, steps)
            judge_frozen(tried)
            judge_same_bits(tried)
            judge_result(tried)

    @exercise.check("group", world_sizes=(3, 4))
    def it_stays_inside_its_group(attempt: Attempt) -> None:
        method = draw_method(attempt)
        judge_within_group(attempt, method, awkward(attempt, method))

    @exercise.check("dtypes", world_sizes=(2,))
    def float32_and_bfloat16(attempt: Attempt) -> None:
        method = draw_method(attempt)
        setting = awkward(attempt, method, dtype=torch.float32)
        judge_result(feed(attempt, method, setting, draw_steps(attempt, method, setting, 6)))
        setting = awkward(attempt, method, dtype=torch.bfloat16)
        steps = draw_steps(attempt, method, setting, 12)
        steps += without_gradients(setting, attempt.world_size, method.drains_within(setting))
        judge_nothing_lost(feed(attempt, method, setting, steps), 12)

    @exercise.check("two models", world_sizes=(2,))
    def a_compressor_may_serve_two_models(attempt: Attempt) -> None:
        method = draw_method(attempt)
        judge_two_models(attempt, method, awkward(attempt, method))

    @exercise.check("equal buckets", world_sizes=(2,))
    def buckets_of_the_same_size_stay_apart(attempt: Attempt) -> None:
        width = attempt.sizes.pick(16, range(12, 100))
        judge_equal_buckets(attempt, draw_method(attempt), (width, 17))

    @exercise.check("training", world_sizes=(2,))
    def a_network_learns_as_well(attempt: Attempt) -> None:
        feedback.judge_learning(attempt, usual)


def _unused(step: int, rank: int, index: int) -> bool:
    """Return whether a rank leaves out a parameter in a step.

    Rank 1 does not use parameter 5 in step 0, and parameter 0 from step 1 on. No rank uses parameter 8 in step 2, or
    parameter 5 in steps 2 and 3. Parameters 7 and 9 are never used.
    """
    on_one_rank = (index, rank, step) == (5, 1, 0) or ((index, rank) == (0, 1) and step > 0)
    return on_one_rank or (index, step) in ((8, 2), (5, 2), (5, 3)) or index in (7, 9)


register(Int8, references.Int8(), lambda attempt: references.Int8())
register(TopK, references.TopK(0.25), lambda attempt: references.TopK(attempt.random.choice((0.02, 0.1))))
register(PowerSGD, references.PowerSGD(2), lambda attempt: references.PowerSGD(attempt.random.choice((1, 3))))


@Int8.check("outliers", world_sizes=(2, 3))
def blocks_have_scales_of_their_own(attempt: Attempt) -> None:
    """Let neighboring blocks differ by a factor of a million, and let all ranks have equal, large values."""
    method = references.Int8()
    setting = Setting(((8 * quantizing.BLOCK,),), said="blocks of very different sizes")
    generator = torch.Generator().manual_seed(attempt.draw_seed())
    steps = []
    for _ in range(30):
        sizes = 10.0 ** torch.tensor([3, -3, 0, 2, -2, 1, -1, 3]).repeat_interleave(quantizing.BLOCK)
        same = 1 + 0.01 * torch.rand(8 * quantizing.BLOCK, generator=generator, dtype=torch.float64)
        steps.append([[[(rank + 1) ** 2 * sizes * same]] for rank in range(attempt.world_size)])
    judge_result(feed(attempt, method, setting, steps))


@Int8.check("sums", world_sizes=(4,))
def sums_are_not_rounded_to_bfloat16(attempt: Attempt) -> None:
    """Let all ranks send whole numbers whose sums need more bits than bf16 has.

    All scales are whole numbers, too. So in the first step, only the sums are rounded, to a multiple of 4.
    """
    method = references.Int8()
    setting = Setting(((2 * quantizing.BLOCK,),), method.arguments, dtype=torch.bfloat16, said="in bfloat16")
    generator = torch.Generator().manual_seed(attempt.draw_seed())
    shares = torch.randint(1, 100, (attempt.world_size, 2 * quantizing.BLOCK), generator=generator).double()
    shares[:, :: quantizing.BLOCK] = quantizing.LEVELS
    steps: Steps = [[[[attempt.world_size * share]] for share in shares]]
    steps += without_gradients(setting, attempt.world_size, method.drains_within(setting))
    hint = "Hint: in which dtype do you add up what the ranks have sent?"
    judge_nothing_lost(feed(attempt, method, setting, steps), 1, tolerance=1e-3, hint=hint)


@TopK.check("large bucket", world_sizes=(2,))
def indices_may_be_large(attempt: Attempt) -> None:
    """Try a bucket with more elements than int16 has values."""
    method = references.TopK(0.01)
    setting = Setting(((70_000,),), method.arguments, dtype=torch.float32)
    judge_result(feed(attempt, method, setting, draw_steps(attempt, method, setting, 2)))


@TopK.check("ties", world_sizes=(2,))
def elements_may_have_the_same_size(attempt: Attempt) -> None:
    """Let all elements be 1 or −1, so that all of them are equally large, but only some can be sent."""
    method = references.TopK(0.1)
    setting = Setting(((200,),), method.arguments, said="all of the same size")
    generator = torch.Generator().manual_seed(attempt.draw_seed())
    signs = torch.randint(2, (attempt.world_size, 200), generator=generator).double() * 2 - 1
    steps: Steps = [[[[own]] for own in signs]]
    steps += without_gradients(setting, attempt.world_size, method.drains_within(setting))
    hint = "Hint: how many elements does this rank send, and how many become zero in unsent?"
    judge_nothing_lost(feed(attempt, method, setting, steps), 1, hint=hint)


@TopK.check("sums", world_sizes=(3, 4))
def sums_are_rounded_once(attempt: Attempt) -> None:
    """Send all elements in bf16, so that a sum that is rounded after each rank's values differs."""
    method = references.TopK(1.0)
    setting = Setting(((600,),), method.arguments, dtype=torch.bfloat16, said="in bfloat16")
    judge_rounded_once(feed(attempt, method, setting, draw_steps(attempt, method, setting, 1)))


@PowerSGD.check("messages", world_sizes=(2,))
def two_messages_per_bucket(attempt: Attempt) -> None:
    """Try a bucket with and one without a matrix that is worth compressing."""
    method = references.PowerSGD(2)
    for setting, most in ((plain(attempt, method), 2), (Setting(((5,), (3, 2)), method.arguments), 1)):
        tried = feed(attempt, method, setting, draw_steps(attempt, method, setting, 1))
        for rank, (step,) in tried.found.items():
            if step.messages != most:
                found = counted(step.messages, "collective")
                evidence = f"{tried.context}: {found} in a step, expected {most}"
                raise Wrong(
                    {rank: evidence},
                    "Hint: which tensors are known at the same time, so that they can be sent together?"
                    if most == 2
                    else "There is no matrix here. Hint: what would a second message contain?",
                )
