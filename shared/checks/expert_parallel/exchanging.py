"""Judge the exchange of sizes and of rows: where every row arrives, where its gradient goes, and what is sent."""

from dataclasses import dataclass

import torch

from shared import wire
from shared.checks.engine.attempts import Attempt, on_each
from shared.checks.engine.candidate import device_here
from shared.checks.engine.compare import describe_calls, first_difference, nearly_equal
from shared.checks.engine.failures import Wrong
from shared.checks.engine.model_parallel.probe import join_one_of
from shared.checks.engine.subgroups import members_of, staying_inside
from shared.checks.expert_parallel.layers import uninitialized_is_nan
from shared.wire import instrumentation

WIDTH = 3
_HINT_ON_ORDER = "Hint: which part of the rows goes to which rank, and in which order do parts arrive?"


def groups_of(attempt: Attempt, in_groups: bool) -> list[list[int]]:
    """Return the groups that work side by side: all ranks, or a subgroup and the others."""
    everybody = list(range(attempt.world_size))
    if not in_groups:
        return [everybody]
    inside = members_of(attempt, True)
    return [inside, [rank for rank in everybody if rank not in inside]]


# -- sizes


def probe_counts(exchange_counts, groups: list[list[int]], counts: list[int]) -> torch.Tensor:
    group, members = join_one_of(groups)
    sent = torch.tensor(counts, device=device_here())
    with staying_inside(members if len(groups) > 1 else None), uninitialized_is_nan():
        received = exchange_counts(sent, group)
    if sent.tolist() != counts:
        raise AssertionError("exchange_counts has overwritten `counts`")
    return torch.as_tensor(received)


def judge_counts(attempt: Attempt, per_rank: int, in_groups: bool = False) -> None:
    groups = groups_of(attempt, in_groups)
    size_of = {rank: len(members) for members in groups for rank in members}
    counts = {rank: [attempt.random.randrange(9) for _ in range(per_rank * size)] for rank, size in size_of.items()}
    results = attempt.run(probe_counts, groups, per_rank=[(counts[rank],) for rank in range(attempt.world_size)])
    for members in groups:
        for index, rank in enumerate(members):
            expected = [counts[other][index * per_rank : (index + 1) * per_rank] for other in members]
            found = results[rank].tolist()
            if found != expected:
                message = f"{per_rank} experts per rank: the result is {found}, expected {expected}"
                hint = "Hint: which rank is a row of the result from, and which of its experts is a column for?"
                raise Wrong({rank: message}, hint)


# -- rows


@dataclass
class Exchanged:
    output: torch.Tensor  # the rows that arrive
    gradient: torch.Tensor | None  # of the rows that were sent
    forward: list[instrumentation.Call]
    backward: list[instrumentation.Call]


def probe_rows(exchange_rows, groups, sent: list[int], received: list[int], rows, slope, transposed: bool) -> Exchanged:
    """Send rows, and run backward.

    Args:
        exchange_rows: The student's function.
        groups: The groups that work side by side.
        sent: How many rows go to each rank.
        received: How many rows come from each rank.
        rows: The rows of this rank.
        slope: The gradient of what this rank receives; None runs backward from the sum of all elements.
        transposed: Whether the rows are a view that is not contiguous.
    """
    group, members = join_one_of(groups)
    rows = rows.to(device_here())
    leaf = (rows.T.contiguous().T if transposed else rows).requires_grad_()
    before = leaf.detach().clone()
    with staying_inside(members if len(groups) > 1 else None), uninitialized_is_nan():
        with instrumentation.listening() as forward:
            output = exchange_rows(leaf, sent, received, group)
        if not output.requires_grad:
            raise AssertionError("the rows that arrive do not require grad, so backward would stop here")
        result = output.detach().clone()
        with instrumentation.listening() as backward:
            (output.sum() if slope is None else (output * slope.to(device_here())).sum()).backward()
    if not torch.equal(before, leaf.detach()):
        raise AssertionError("exchange_rows has overwritten the rows that it gets")
    return Exchanged(result, leaf.grad, forward, backward)


class Transfer:
    """How many rows each member of a group sends to each other one, the rows, and the gradients of what arrives.

    Two members never send each other equally many rows: otherwise, backward could mix up what it sends and receives.
    """

    def __init__(self, attempt: Attempt, size: int, idle: tuple[int, ...] = (), deaf: tuple[int, ...] = ()):
        generator = torch.Generator().manual_seed(attempt.draw_seed())
        there = torch.randint(0, 5, (size, size), generator=generator)
        back = (there + torch.randint(1, 5, (size, size), generator=generator)) % 5
        self.counts = there.triu() + back.T.tril(-1)
        self.counts[list(idle)] = 0
        self.counts[:, list(deaf)] = 0

        def draw(rows: int) -> torch.Tensor:
            return torch.randn(rows, WIDTH, generator=generator, dtype=torch.float64)

        self.rows = [draw(int(row.sum())) for row in self.counts]
        self.slopes = [draw(int(column.sum())) for column in self.counts.T]

    def received(self, index: int) -> torch.Tensor:
        pieces = [rows.split(sizes.tolist()) for rows, sizes in zip(self.rows, self.counts, strict=True)]
        return torch.cat([each[index] for each in pieces])

    def gradient(self, index: int) -> torch.Tensor:
        pieces = [slope.split(sizes.tolist()) for slope, sizes in zip(self.slopes, self.counts.T, strict=True)]
        return torch.cat([each[index] for each in pieces])

    def sent_bytes(self, index: int) -> int:
        return int(self.counts[index].sum() - self.counts[index, index]) * WIDTH * 8

    def returned_bytes(self, index: int) -> int:
        return int(self.counts[:, index].sum() - self.counts[index, index]) * WIDTH * 8


def judge_rows(
    attempt: Attempt,
    idle: tuple[int, ...] = (),
    deaf: tuple[int, ...] = (),
    in_groups: bool = False,
    sums: bool = False,
    transposed: bool = False,
    wire_only: bool = False,
) -> None:
    """Exchange rows once.

    Args:
        idle: The ranks that send nothing.
        deaf: The ranks that receive nothing.
        in_groups: Whether two groups work side by side.
        sums: Whether backward begins with a gradient that is expanded from one element.
        transposed: Whether the rows are not contiguous.
        wire_only: Whether to judge the bytes instead of the values.
    """
    groups = groups_of(attempt, in_groups)
    transfers = [Transfer(attempt, len(members), idle, deaf) for members in groups]
    own, places = {}, {}
    for members, transfer in zip(groups, transfers, strict=True):
        for index, rank in enumerate(members):
            sent, received = transfer.counts[index].tolist(), transfer.counts[:, index].tolist()
            slope = None if sums else transfer.slopes[index]
            own[rank], places[rank] = (sent, received, transfer.rows[index], slope, transposed), (transfer, index)
    kinds = {"a gradient that is not contiguous": sums, "rows that are not contiguous": transposed}
    context = "".join(f"{kind}: " for kind, applies in kinds.items() if applies)
    per_rank = [own[rank] for rank in range(attempt.world_size)]
    results = attempt.run(probe_rows, groups, per_rank=per_rank, context=context.removesuffix(": "))
    for rank, found in enumerate(results):
        transfer, index = places[rank]
        where = f"{context}this rank sends {own[rank][0]} rows and receives {own[rank][1]}"
        if wire_only:
            _judge_bytes(rank, found.forward, transfer.sent_bytes(index), f"{where}; in forward")
            _judge_bytes(rank, found.backward, transfer.returned_bytes(index), f"{where}; in backward")
            continue
        if not nearly_equal(found.output, transfer.received(index)):
            difference = first_difference(found.output, transfer.received(index))
            raise Wrong({rank: f"{where}; what arrives: {difference}"}, _HINT_ON_ORDER)
        expected = torch.ones_like(transfer.rows[index]) if sums else transfer.gradient(index)
        if found.gradient is None or not nearly_equal(found.gradient, expected):
            difference = "it is None" if found.gradient is None else first_difference(found.gradient, expected)
            hint = "Hint: to which rank does the gradient of a received row belong, and how many rows does it get back?"
            raise Wrong({rank: f"{where}; the gradient of its rows: {difference}"}, hint)


def _judge_bytes(rank: int, calls: list, expected: int, context: str) -> None:
    sent = sum(wire.sent_bytes_of(call, rank) for call in calls)
    if abs(sent - expected) > 1:
        message = f"{context}, it sends {sent:,.0f} bytes ({describe_calls(calls)}); expected {expected:,}"
        raise Wrong(
            {rank: message}, "Hint: which rows leave this rank, and does any rank get rows that it does not need?"
        )


plain_counts = on_each(judge_counts, 2)
counts_of_other_sizes = on_each(judge_counts, 1, 2, 3)


def counts_in_groups(attempt: Attempt) -> None:
    judge_counts(attempt, 2, in_groups=True)


def plain_rows(attempt: Attempt) -> None:
    judge_rows(attempt)


def gradients_go_back(attempt: Attempt) -> None:
    for _ in range(2):
        judge_rows(attempt)
    judge_rows(attempt, sums=True)
    judge_rows(attempt, transposed=True)


def ranks_that_send_nothing(attempt: Attempt) -> None:
    idle = attempt.random.randrange(attempt.world_size)
    judge_rows(attempt, idle=(idle,))
    judge_rows(attempt, deaf=(idle,))
    judge_rows(attempt, idle=(idle,), deaf=(idle,))
    judge_rows(attempt, idle=tuple(range(attempt.world_size)))


def rows_are_sent_once(attempt: Attempt) -> None:
    judge_rows(attempt, wire_only=True)
    judge_rows(attempt, idle=(attempt.random.randrange(attempt.world_size),), wire_only=True)


def rows_in_groups(attempt: Attempt) -> None:
    judge_rows(attempt, in_groups=True)
