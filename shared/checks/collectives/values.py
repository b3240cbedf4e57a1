"""Check the values that the functions of chapter 01 compute."""

import torch

from shared.checks.collectives.probes import SLICED, STRIDED, TRANSPOSED, Setting, named, probe_gather_around
from shared.checks.collectives.results import any_source, describe_setting, draw, even_shape, sources, try_and_judge
from shared.checks.engine.attempts import Attempt
from shared.checks.engine.compare import first_difference
from shared.checks.engine.failures import Wrong

HINT_ON_LENGTHS = "Hint: how long is the chunk that a rank receives, and how long is the tensor that it receives into?"


def right_where_n_divides(attempt: Attempt) -> None:
    shapes = [even_shape(attempt), (4, 3, 4)][: 1 if attempt.piece == "ring_all_gather" else 2]  # a shard is flat
    long = (12 * attempt.sizes.pick(10_000, range(5_000, 30_000)),)  # Every world size up to 4 divides it.
    for src in sources(attempt):
        try_and_judge(attempt, Setting(src=src), *(draw(attempt, shape) for shape in [*shapes, long]))


def receivers_lose_their_old_values(attempt: Attempt) -> None:
    """A value of nan stays nan, whatever is added to it. This call also leaves out `src`, to test its default."""
    own = draw(attempt, even_shape(attempt))
    try_and_judge(attempt, Setting(), [own[0], *(torch.full_like(tensor, torch.nan) for tensor in own[1:])])


def each_rank_gets_its_left_neighbors_tensor(attempt: Attempt) -> None:
    rows, long = attempt.sizes.pick(10, range(2, 50)), attempt.sizes.pick(100_000, range(50_000, 300_000))
    for shape, dtype in (((rows, 100), torch.int64), ((1,), torch.bfloat16), ((long,), torch.float32)):
        try_and_judge(attempt, Setting(), draw(attempt, shape, dtype))


def right_for_any_size(attempt: Attempt) -> None:
    """Try sizes that the world size does not divide, fewer elements than ranks, and no elements at all."""
    size, flat = attempt.world_size, attempt.piece == "ring_all_gather"
    for shapes in ([(5 * size + 1,), (4 * size - 1,), (3, size + 2)], [(size + 1,), (1,)], [(), (0,)]):
        kept = [shape for shape in shapes if len(shape) == 1 or not flat]
        try_and_judge(attempt, Setting(src=any_source(attempt)), *(draw(attempt, shape) for shape in kept))


def chunks_of_other_lengths_are_gathered(attempt: Attempt) -> None:
    """In an all-reduce, the last chunks may be shorter than the first, or empty."""
    for numel in (4 * attempt.world_size - 1, attempt.world_size + 1):
        (flat,) = draw(attempt, (numel,))[:1]
        size = -(-numel // attempt.world_size)
        own = [flat[index * size : (index + 1) * size] for index in range(attempt.world_size)]
        numels = [len(chunk) for chunk in own]
        context = f"gather_around() was called with chunks of {', '.join(map(str, numels))} elements"
        found = attempt.run(probe_gather_around, numels, per_rank=[(chunk.clone(),) for chunk in own], context=context)
        for rank, gathered in enumerate(found):
            if gathered is not None and not torch.equal(gathered, flat):
                message = f"{context}: {first_difference(gathered, flat, 0.0)}"
                raise Wrong({rank: message}, HINT_ON_LENGTHS)


def right_in_every_dtype(attempt: Attempt) -> None:
    dtypes = (torch.float64, torch.bfloat16, torch.int64, torch.int32)
    try_and_judge(
        attempt, Setting(src=any_source(attempt)), *(draw(attempt, even_shape(attempt), dtype) for dtype in dtypes)
    )


def right_or_rejected_if_not_contiguous(attempt: Attempt) -> None:
    for layout, shape in ((SLICED, (13,)), (TRANSPOSED, (3, 5)), (STRIDED, (13,))):
        if len(shape) > 1 and attempt.piece == "ring_all_gather":
            continue
        try:
            _right_or_rejected(attempt, layout, shape)
        except Wrong as wrong:
            if layout != SLICED:  # a slice is contiguous
                wrong.hint = wrong.hint or (
                    "The lines that are given make a contiguous copy of this tensor. Hint: which of your own lines use "
                    "the tensor itself instead?"
                )
            raise


def _right_or_rejected(attempt: Attempt, layout: str, shape: tuple[int, ...]) -> None:
    setting, own = Setting(layout=layout, src=any_source(attempt)), draw(attempt, shape)
    for rank, found in enumerate(try_and_judge(attempt, setting, own)[0]):
        if found["torn"]:
            where = "between those of the argument" if layout == STRIDED else "before or after the argument"
            raise Wrong({rank: f"{describe_setting(setting, own[0])}: elements {where} were changed"})


def every_rank_has_the_same_bits(attempt: Attempt) -> None:
    """If each rank adds up in its own order, replicas drift apart."""
    draws = [draw(attempt, (120,), dtype) for dtype in (torch.float32, torch.bfloat16)]
    for own, tries in zip(draws, try_and_judge(attempt, Setting(), *draws), strict=True):
        first, *others = [found["argument"] for found in tries]
        for rank, theirs in enumerate(others, 1):
            if not torch.equal(theirs, first):
                index = int((theirs != first).nonzero()[0])
                message = f"element {index} is {theirs[index].item():.9g}, but {first[index].item():.9g} on rank 0"
                raise Wrong(
                    {rank: f"{named(own[0])}: {message}"},
                    "Hint: on how many ranks is each sum computed, and what do the others receive?",
                )
