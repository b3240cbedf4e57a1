"""Check that the samplers of all ranks divide an epoch's samples among them, in exercise 2.6 of `manual_ddp`."""

import random
from dataclasses import dataclass, field
from itertools import islice, zip_longest

import torch
import torch.distributed as dist

from shared.checks.engine.attempts import Attempt
from shared.checks.engine.compare import describe_calls
from shared.checks.engine.failures import Wrong
from shared.wire import instrumentation

EPOCHS = 1, 2, 3, 10
PASSES = None, None, 2, None, 1, 2  # over one sampler; set_epoch() is called before those that are not None
LENGTHS, LATE_EPOCHS = range(61, 2_000), range(12, 100_000)  # may be drawn


Shares = list[list]  # of each rank


@dataclass
class Sampled:
    """What samplers yield. Unless a field says otherwise, all ranks' samplers are new and set to an epoch."""

    early_len: int  # before any iteration
    passes: list[list]  # as in PASSES, on rank 0
    iterators_agree: bool  # two of them over one sampler, at the same time
    epochs: list[Shares]
    orders: list[list]  # of a single rank, in epoch 0 and in these epochs
    unset: list  # on this rank, without set_epoch()
    own_len: int  # of that sampler
    epoch_0: Shares
    again: Shares  # epoch 0 once more
    epoch_1: Shares
    other_seed: Shares
    in_order: Shares  # with shuffle=False
    calls: list[instrumentation.Call]
    random_state_kept: dict[str, bool] = field(default_factory=dict)  # by the owner of the state


def probe_sampler(sampler_class, length: int, seed: int, epochs: tuple[int, ...] = EPOCHS) -> Sampled:
    """Iterate over every rank's sampler on this rank, because samplers may depend only on their arguments."""
    world_size = dist.get_world_size()
    random_states = torch.get_rng_state(), random.getstate()

    def taken(indices) -> list:
        return list(islice(indices, 2 * length + world_size))

    def drawn(epoch: int = 0, ranks: int = world_size, **options) -> Shares:
        samplers = [sampler_class(length, rank, ranks, **options) for rank in range(ranks)]
        for sampler in samplers:
            sampler.set_epoch(epoch)
        return [taken(sampler) for sampler in samplers]

    def one_after_another() -> list[list]:
        sampler, passes = sampler_class(length, 0, world_size, seed=seed), []
        for epoch in PASSES:
            if epoch is not None:
                sampler.set_epoch(epoch)
            passes.append(taken(sampler))
        return passes

    def two_at_once() -> bool:
        sampler = sampler_class(length, 0, world_size, seed=seed)
        return all(one == other for one, other in taken(zip_longest(sampler, sampler)))

    with instrumentation.listening() as calls:
        unset = sampler_class(length, dist.get_rank(), world_size, seed=seed)
        _refuse_library_samplers(unset)
        found = Sampled(
            early_len=len(sampler_class(length, 0, world_size)),
            passes=one_after_another(),
            iterators_agree=two_at_once(),
            epochs=[drawn(epoch, seed=seed) for epoch in epochs],
            orders=[drawn(epoch, 1, seed=seed)[0] for epoch in (0, *epochs)],
            unset=taken(unset),
            own_len=len(unset),
            epoch_0=drawn(0, seed=seed),
            again=drawn(0, seed=seed),
            epoch_1=drawn(1, seed=seed),
            other_seed=drawn(0, seed=seed + 100_003),
            in_order=drawn(shuffle=False),
            calls=calls,
        )
    found.random_state_kept["torch"] = torch.equal(random_states[0], torch.get_rng_state())
    found.random_state_kept["Python's random"] = random_states[1] == random.getstate()
    return found


def _refuse_library_samplers(sampler) -> None:
    for part in [sampler, *getattr(sampler, "__dict__", {}).values()]:
        if any(base.__module__ == "torch.utils.data.distributed" for base in type(part).__mro__):
            raise AssertionError("this sampler uses torch's own DistributedSampler: write it by hand")


def every_sample_once_and_equal_shares(attempt: Attempt) -> None:
    size = attempt.world_size
    for length in (12, attempt.sizes.pick(7, LENGTHS), size, 1):
        found = attempt.run(probe_sampler, length, attempt.draw_seed())
        share = -(-length // size)
        for rank, result in enumerate(found):
            _judge_shares(rank, result.epoch_0, length, share)
            _judge_shares(rank, result.in_order, length, share)
            for later in result.epochs:
                _judge_shares(rank, later, length, share)
            if result.own_len != share or result.early_len != share:
                raise Wrong({rank: f"len() is {result.own_len} for {length} samples on {size} ranks; expected {share}"})
            if result.epoch_0 != found[0].epoch_0 or result.unset != result.epoch_0[rank]:
                message = "for one seed and epoch, this rank's order differs from rank 0's, or set_epoch(0) changes it"
                raise Wrong({rank: message}, "Hint: what does the order depend on besides the seed and the epoch?")
            expected = _divided(list(range(length)), size)
            if result.in_order != expected:
                message = f"shuffle=False, {length} samples on {size} ranks: the ranks yield {result.in_order}"
                raise Wrong({rank: f"{message}; expected {expected}"})
            for shares, order in zip([result.epoch_0, *result.epochs], result.orders, strict=True):
                if sorted(order) != list(range(length)):
                    _judge_shares(rank, [order], length, length)
                _judge_division(rank, shares, order)


def _divided(order: list[int], size: int) -> list[list[int]]:
    """Divide an order among `size` ranks: each takes every size-th index, and the order begins again at its end."""
    length = len(order)
    return [[order[at % length] for at in range(rank, -(-length // size) * size, size)] for rank in range(size)]


def _judge_division(rank: int, shares: list[list[int]], order: list[int]) -> None:
    """Check that shuffled shares are those of the order that a single rank would take."""
    expected = _divided(order, len(shares))
    other = next((r for r, share in enumerate(shares) if share != expected[r]), None)
    if other is None:
        return
    samples = f"{len(order)} samples" if len(order) > 1 else "1 sample"
    message = (
        f"with shuffle, a single rank would yield {samples} in the order {order}. "
        f"On {len(shares)} ranks, rank {other} yields {shares[other]}; expected {expected[other]}"
    )
    if [shares[at % len(shares)][at // len(shares)] for at in range(len(order))] == order:
        raise Wrong({rank: message}, "Hint: what comes after the last index of the shuffled order?")
    raise Wrong(
        {rank: message},
        "Hint: which positions of the shuffled order does this rank take? "
        "And does the order depend on anything besides the seed and the epoch?",
    )


def _judge_shares(rank: int, shares: list[list], length: int, share: int) -> None:
    """Check that each share has `share` ints, and that together they contain each sample about equally often."""
    drawn = [sample for own in shares for sample in own]
    strange = next((sample for sample in drawn if type(sample) is not int), None)
    if strange is not None:
        raise Wrong({rank: f"yields {type(strange).__name__}s; expected ints"})
    sizes = [len(own) for own in shares]
    if sizes != [share] * len(shares):
        samples = f"{length} sample{'s' if length > 1 else ''}"
        case = "there are fewer samples than ranks" if length < len(shares) else "world_size does not divide the length"
        message = f"for {samples}, the ranks yield {sizes} indices; expected {share} each"
        raise Wrong(message, f"Hint: which indices does each rank yield if {case}?")
    if set(drawn) != set(range(length)):
        missing = sorted(set(range(length)) - set(drawn))
        message = f"for {length} samples on {len(shares)} ranks, no rank yields {missing}; together, they yield {drawn}"
        raise Wrong({rank: message}, "Hint: do all ranks have the same shuffled order before each takes its share?")
    most = -(-len(drawn) // length)
    often = sorted(sample for sample in set(drawn) if drawn.count(sample) > most)
    if often:
        raise Wrong(
            {rank: f"samples {often} are yielded more than {'once' if most == 1 else f'{most} times'}: {drawn}"},
            "Hint: which samples are repeated so that all shares have the same size?",
        )


def epochs_and_seeds_decide_the_order(attempt: Attempt) -> None:
    length = attempt.sizes.pick(60, LENGTHS)
    epochs = (*EPOCHS, attempt.sizes.pick(EPOCHS[-1] + 1, LATE_EPOCHS))
    for rank, result in enumerate(attempt.run(probe_sampler, length, attempt.draw_seed(), epochs)):
        if result.epoch_0 != result.again:
            raise Wrong({rank: "the same epoch has two different orders"}, "Hint: how is the generator seeded?")
        _judge_passes(rank, result)
        if not result.iterators_agree:
            raise Wrong(
                {rank: "two iterators over the same sampler at the same time yield different samples"},
                "Hint: which object stores the position of an iteration?",
            )
        if result.epoch_0 == result.epoch_1:
            raise Wrong({rank: "epochs 0 and 1 have the same order"}, "Hint: what should set_epoch() change?")
        orders = [result.epoch_0, *result.epochs]
        if any(one == other for index, one in enumerate(orders) for other in orders[:index]):
            raise Wrong(
                {rank: "two epochs have the same order"}, "Hint: how do the seed and the epoch determine the order?"
            )
        if attempt.world_size > 1 and set(orders[0][0]) == set(orders[1][0]):
            raise Wrong(
                {rank: "rank 0 has the same samples in epochs 0 and 1"},
                "Hint: are the samples shuffled before or after they are divided among the ranks?",
            )
        if result.epoch_0 == result.other_seed:
            raise Wrong({rank: "two different seeds give the same order"}, "Hint: which line uses the seed?")
        if result.epoch_0 == result.in_order:
            raise Wrong({rank: "with shuffle=True, the samples are not shuffled"}, "Hint: which line shuffles?")
        for owner, kept in result.random_state_kept.items():
            if not kept:
                message = f"iterating changes the global random state of {owner}, so later draws depend on it"
                raise Wrong({rank: message}, "Hint: which generator draws the random numbers?")


def _judge_passes(rank: int, result: Sampled) -> None:
    """Check what one sampler yields when it is iterated over several times, with set_epoch() before some of them."""
    firsts = [shares[0] for shares in result.epochs]
    right, epoch, called = {0: result.epoch_0[0]} | dict(zip(EPOCHS, firsts, strict=False)), 0, []
    for number, (argument, indices) in enumerate(zip(PASSES, result.passes, strict=True), 1):
        if argument is not None:
            epoch = argument
            called.append(f"set_epoch({argument})")
        if indices != right[epoch]:
            after = f" after {', '.join(called)}" if called else ""
            what = f"pass {number} over the same sampler{after} yields "
            if len(indices) != len(right[epoch]):
                raise Wrong(
                    {rank: f"{what}{len(indices)} indices; expected {len(right[epoch])}"},
                    "Hint: which method must begin a new iteration?",
                )
            raise Wrong(
                {rank: f"{what}a different order than epoch {epoch} of a new sampler"},
                "Hint: when is the generator seeded, and which lines change what it is seeded with?",
            )


def the_sampler_needs_no_messages(attempt: Attempt) -> None:
    for rank, result in enumerate(attempt.run(probe_sampler, 12, attempt.draw_seed())):
        if result.calls:
            raise Wrong({rank: f"{describe_calls(result.calls)}; expected none, because a shared seed is enough"})
