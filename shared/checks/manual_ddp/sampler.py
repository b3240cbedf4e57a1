"""Check that the samplers of all ranks divide an epoch's samples among them, in exercise 2.5 of `manual_ddp`."""

from itertools import islice

import torch
import torch.distributed as dist

from shared.checks.engine.compare import describe_calls
from shared.checks.engine.framework import Attempt, Wrong
from shared.wire import instrumentation

EPOCHS = 1, 2, 3, 10
LENGTHS, LATE_EPOCHS = range(61, 2_000), range(12, 100_000)  # drawn in grading


def probe_sampler(sampler_class, length: int, seed: int, epochs: tuple[int, ...] = EPOCHS) -> dict:
    """Iterate over every rank's sampler on this rank, because samplers may depend only on their arguments."""
    world_size = dist.get_world_size()
    random_state = torch.get_rng_state()

    def drawn(epoch: int = 0, **options) -> list[list]:
        samplers = [sampler_class(length, rank, world_size, **options) for rank in range(world_size)]
        for sampler in samplers:
            sampler.set_epoch(epoch)
        return [list(islice(sampler, 2 * length + world_size)) for sampler in samplers]

    def twice_at_once() -> bool:
        sampler = sampler_class(length, 0, world_size, seed=seed)
        return all(one == other for one, other in zip(sampler, sampler, strict=True))

    with instrumentation.listening() as calls:
        unset = sampler_class(length, dist.get_rank(), world_size, seed=seed)
        early = len(sampler_class(length, 0, world_size))
        found = {
            "len before": early,
            "two iterators": twice_at_once(),
            "epochs": [drawn(epoch, seed=seed) for epoch in epochs],
            "unset": list(islice(unset, 2 * length + world_size)),
            "len": len(unset),
            "epoch 0": drawn(0, seed=seed),
            "again": drawn(0, seed=seed),
            "epoch 1": drawn(1, seed=seed),
            "other seed": drawn(0, seed=seed + 100_003),
            "in order": drawn(shuffle=False),
        }
    return {**found, "calls": calls, "random numbers": torch.equal(random_state, torch.get_rng_state())}


def every_sample_once_and_equal_shares(attempt: Attempt) -> None:
    size = attempt.world_size
    for length in (12, attempt.scale.number(7, LENGTHS), size, 1):
        found = attempt.run(probe_sampler, length, attempt.draw_seed())
        share = -(-length // size)
        for rank, result in enumerate(found):
            _judge_shares(rank, result["epoch 0"], length, share)
            _judge_shares(rank, result["in order"], length, share)
            for later in result["epochs"]:
                _judge_shares(rank, later, length, share)
            if not result["two iterators"]:
                raise Wrong({rank: "two iterators over the same sampler at the same time yield different samples"})
            if result["len"] != share or result["len before"] != share:
                raise Wrong({rank: f"len() is {result['len']} for {length} samples on {size} ranks; expected {share}"})
            if result["epoch 0"] != found[0]["epoch 0"] or result["unset"] != result["epoch 0"][rank]:
                message = "for one seed and epoch, this rank's order differs from rank 0's, or set_epoch(0) changes it"
                raise Wrong({rank: message}, "Hint: what does the order depend on besides the seed and the epoch?")
            expected = [[index % length for index in range(r, share * size, size)] for r in range(size)]
            if result["in order"] != expected:
                message = f"shuffle=False, {length} samples on {size} ranks: the ranks yield {result['in order']}"
                raise Wrong({rank: f"{message}; expected {expected}"})


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
        message = f"of {length} samples on {len(shares)} ranks, no rank yields {missing}; together, they yield {drawn}"
        raise Wrong({rank: message}, "Hint: do all ranks have the same shuffled order before each takes its share?")
    most = -(-len(drawn) // length)
    often = sorted(sample for sample in set(drawn) if drawn.count(sample) > most)
    if often:
        raise Wrong(
            {rank: f"samples {often} are yielded more than {'once' if most == 1 else f'{most} times'}: {drawn}"},
            "Hint: which samples are repeated so that all shares have the same size?",
        )


def epochs_and_seeds_decide_the_order(attempt: Attempt) -> None:
    length = attempt.scale.number(60, LENGTHS)
    epochs = (*EPOCHS, attempt.scale.number(EPOCHS[-1] + 1, LATE_EPOCHS))
    for rank, result in enumerate(attempt.run(probe_sampler, length, attempt.draw_seed(), epochs)):
        if result["epoch 0"] != result["again"]:
            raise Wrong({rank: "the same epoch has two different orders"}, "Hint: how is the generator seeded?")
        if result["epoch 0"] == result["epoch 1"]:
            raise Wrong({rank: "epochs 0 and 1 have the same order"}, "Hint: what should set_epoch() change?")
        orders = [result["epoch 0"], *result["epochs"]]
        if any(one == other for index, one in enumerate(orders) for other in orders[:index]):
            raise Wrong(
                {rank: "two epochs have the same order"}, "Hint: how do the seed and the epoch determine the order?"
            )
        if attempt.world_size > 1 and set(orders[0][0]) == set(orders[1][0]):
            raise Wrong(
                {rank: "rank 0 has the same samples in epochs 0 and 1"},
                "Hint: are the samples shuffled before or after they are divided among the ranks?",
            )
        if result["epoch 0"] == result["other seed"]:
            raise Wrong({rank: "two different seeds give the same order"}, "Hint: which line uses the seed?")
        if result["epoch 0"] == result["in order"]:
            raise Wrong({rank: "with shuffle=True, the samples are not shuffled"}, "Hint: which line shuffles?")
        if not result["random numbers"]:
            message = "iterating changes torch's global random state, so dropout depends on the sampler"
            raise Wrong({rank: message}, "Hint: which generator draws the random numbers?")


def the_sampler_needs_no_messages(attempt: Attempt) -> None:
    for rank, result in enumerate(attempt.run(probe_sampler, 12, attempt.draw_seed())):
        if result["calls"]:
            raise Wrong({rank: f"{describe_calls(result['calls'])}; expected none, because a shared seed is enough"})
