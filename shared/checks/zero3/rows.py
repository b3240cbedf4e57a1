"""Judge RowShards: copy-in, copy-out and the all-gather between them, with rows that do not divide by the ranks."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from shared.checks.engine.attempts import Attempt
from shared.checks.engine.candidate import device_here
from shared.checks.engine.compare import describe_calls, first_difference
from shared.checks.engine.failures import Wrong
from shared.checks.engine.subgroups import SUBGROUPS, called_alone, join_subgroup, members_of
from shared.wire import instrumentation

PADDING = 7.0  # what lies in the padding that copy_out() gets, so that reading it shows

_HINT_ON_SIZES = "Every rank sends equally much. Hint: how many rows does rank 0 have, and who else sends so many?"
_HINT_ON_SLOTS = "Hint: what follows the rows of one parameter in a slot: its padding, or the next parameter?"
_HINT_ON_PADDING = "Hint: which elements of the slot does no shard fill?"
_HINT_ON_COPY_OUT = (
    "Hint: where do the rows of this parameter begin in each rank's slot, and how many of them are not padding?"
)
_HINT_ON_MEMORY = "Hint: which operation writes into the memory that a parameter has, instead of giving it another one?"
_HINT_ON_CALLS = "Hint: which of the methods may communicate?"


@dataclass(frozen=True)
class Case:
    shapes: tuple[tuple[int, ...], ...]
    dtype: torch.dtype = torch.float32
    in_subgroup: bool = False

    def __str__(self) -> str:
        return f"parameters {', '.join(str(list(shape)) for shape in self.shapes)} of {self.dtype}"

    def draw(self, attempt: Attempt) -> list[torch.Tensor]:
        generator = torch.Generator().manual_seed(attempt.draw_seed())
        return [torch.randn(shape, generator=generator).to(self.dtype) for shape in self.shapes]

    def moment(self, attempt: Attempt, method: str) -> str:
        return f"{called_alone(attempt)}, {self}: {method}()" if self.in_subgroup else f"{self}: {method}()"


EVEN = Case(((4, 2), (2,)))
SEVEN = Case(((7,),))
UNEVEN = Case(((7, 3), (1,), (5, 2, 2)), torch.float64)


def _draw_cases(attempt: Attempt) -> list[Case]:
    """Draw shapes with 1 to 9 rows. Some have fewer rows than there are ranks."""
    rows = [attempt.random.randint(1, 9) for _ in range(5)]
    drawn = ((rows[0], 3), (rows[1],), (rows[2], 1, 2), (rows[3], 2), (rows[4],))
    return [SEVEN, UNEVEN, Case(drawn, attempt.random.choice((torch.bfloat16, torch.float32)))]


def own_rows(full: torch.Tensor, rank: int, size: int) -> torch.Tensor:
    """Return the rows that torch.chunk gives to a rank."""
    most_rows = -(-len(full) // size)
    return full[rank * most_rows : (rank + 1) * most_rows]


def slot_of(values: list[torch.Tensor], rank: int, size: int, padding: float = 0.0) -> torch.Tensor:
    """Return what a rank sends: each parameter's rows, flattened and padded."""
    pieces = []
    for full in values:
        rows = own_rows(full, rank, size)
        numel = -(-len(full) // size) * full[0].numel()
        pieces += [rows.flatten(), full.new_full((numel - rows.numel(),), padding)]
    return torch.cat(pieces)


def _build(row_shards, case: Case, shards: list[torch.Tensor]):
    """Build the piece on zeros and give it these shards. Returns None on a rank outside the group."""
    group, is_member = join_subgroup(case.in_subgroup)
    if not is_member:
        return None
    zeros = [torch.zeros(shape, dtype=case.dtype, device=device_here()) for shape in case.shapes]
    rows = row_shards([nn.Parameter(each) for each in zeros], group)
    for shard, value in zip(rows.shards, shards, strict=True):
        shard.copy_(value)
    return rows


@dataclass
class Copied:
    slot: Any  # what copy_in() returns
    moved: bool  # whether a parameter has other memory than before
    full: list[torch.Tensor]  # the parameters
    calls: list[instrumentation.Call]


@torch.no_grad()
def probe_copies(row_shards, case: Case, shards: list[torch.Tensor], gathered: torch.Tensor) -> Copied | None:
    """Call copy_in(), and copy_out() with a buffer that nobody has sent."""
    rows = _build(row_shards, case, shards)
    if rows is None:
        return None
    before = [each.data_ptr() for each in rows.parameters]
    with instrumentation.listening() as calls:
        slot = rows.copy_in()
        slot = slot.detach().cpu().clone() if torch.is_tensor(slot) else slot
        if gathered is not None:
            rows.copy_out(gathered.to(device_here()))
    moved = before != [each.data_ptr() for each in rows.parameters]
    return Copied(slot, moved, [each.detach().cpu().clone() for each in rows.parameters], calls)


@dataclass
class Unsharded:
    full: list[torch.Tensor]  # the parameters
    calls: list[instrumentation.Call]


@torch.no_grad()
def probe_unshard(row_shards, case: Case, shards: list[torch.Tensor]) -> Unsharded | None:
    rows = _build(row_shards, case, shards)
    if rows is None:
        return None
    rows.reshard()
    with instrumentation.listening() as calls:
        rows.unshard()
    return Unsharded([each.detach().cpu().clone() for each in rows.parameters], calls)


def _shards(attempt: Attempt, case: Case, values: list[torch.Tensor]) -> tuple[list[int], list[list[torch.Tensor]]]:
    """Return the ranks that take part, and the shards of every rank of the world: none outside the group."""
    members = members_of(attempt, case.in_subgroup)
    size = len(members)
    return members, [
        [own_rows(full, members.index(rank), size).clone() for full in values] if rank in members else []
        for rank in range(attempt.world_size)
    ]


def _judge_copy_in(attempt: Attempt, case: Case) -> None:
    values = case.draw(attempt)
    members, shards = _shards(attempt, case, values)
    per_rank = [(each, None) for each in shards]
    found = attempt.run(probe_copies, case, per_rank=per_rank, context=case.moment(attempt, "copy_in"))
    for index, rank in enumerate(members):
        slot, expected = found[rank].slot, slot_of(values, index, len(members))
        evidence = case.moment(attempt, "copy_in")
        if not torch.is_tensor(slot) or slot.dim() != 1:
            got = f"a tensor of shape {list(slot.shape)}" if torch.is_tensor(slot) else type(slot).__name__
            raise Wrong({rank: f"{evidence} returns {got}; expected a tensor with one dimension"})
        if slot.dtype != expected.dtype:
            hint = "Hint: which dtype do the shards have?"
            raise Wrong({rank: f"{evidence} returns {slot.dtype}; expected {expected.dtype}"}, hint)
        if len(slot) != len(expected):
            what = f"{evidence} returns {len(slot)} elements on rank {index} of {len(members)}"
            raise Wrong({rank: f"{what}; expected {len(expected)}"}, _HINT_ON_SIZES)
        if not torch.equal(slot, expected):
            is_padding = slot_of([torch.ones_like(each) for each in values], index, len(members)) == 0
            only_padding = torch.equal(slot[~is_padding], expected[~is_padding])
            hint = _HINT_ON_PADDING if only_padding else _HINT_ON_SLOTS
            raise Wrong({rank: f"{evidence}: {first_difference(slot, expected, 0.0)}"}, hint)
        _expect_no_calls(rank, evidence, found[rank].calls)


def _judge_copy_out(attempt: Attempt, case: Case) -> None:
    values, sent = case.draw(attempt), case.draw(attempt)
    members, shards = _shards(attempt, case, values)
    size = len(members)
    gathered = torch.cat([slot_of(sent, index, size, PADDING) for index in range(size)])
    evidence = case.moment(attempt, "copy_out")
    per_rank = [(each, gathered) for each in shards]
    found = attempt.run(probe_copies, case, per_rank=per_rank, context=evidence)
    for rank in members:
        _judge_full(rank, found[rank].full, sent, evidence)
        if found[rank].moved:
            raise Wrong({rank: f"{evidence}: a parameter has other memory than before"}, _HINT_ON_MEMORY)
        _expect_no_calls(rank, evidence, found[rank].calls)


def _judge_full(rank: int, full: list[torch.Tensor], expected: list[torch.Tensor], evidence: str) -> None:
    for index, (value, right) in enumerate(zip(full, expected, strict=True)):
        if not torch.equal(value, right):
            what = f"{evidence}: parameter {index}, {list(right.shape)}: {first_difference(value, right, 0.0)}"
            raise Wrong({rank: what}, _HINT_ON_COPY_OUT)


def _expect_no_calls(rank: int, evidence: str, calls: list) -> None:
    if calls:
        raise Wrong({rank: f"{evidence}: {describe_calls(calls)}; expected no message"}, _HINT_ON_CALLS)


def _judge_unshard(attempt: Attempt, case: Case) -> None:
    _judge_copy_in(attempt, case)  # first, because slots of different sizes would hang the all-gather
    values = case.draw(attempt)
    members, shards = _shards(attempt, case, values)
    evidence = case.moment(attempt, "unshard")
    found = attempt.run(probe_unshard, case, per_rank=[(each,) for each in shards], context=evidence)
    most_bytes = len(members) * slot_of(values, 0, len(members)).nbytes
    for rank in members:
        calls = found[rank].calls
        is_all_gather = len(calls) == 1 and calls[0].op.startswith("all_gather")
        if not is_all_gather or calls[0].payload_bytes != most_bytes:
            what = f"{evidence}: {describe_calls(calls)}; expected one all-gather of {most_bytes} bytes"
            raise Wrong({rank: what}, _HINT_ON_CALLS)
        _judge_full(rank, found[rank].full, values, evidence)


def rows_that_divide_come_and_go(attempt: Attempt) -> None:
    """Try two parameters whose rows divide by the ranks, so that nothing is padded."""
    _judge_copy_in(attempt, EVEN)
    _judge_copy_out(attempt, EVEN)


def slots_are_padded(attempt: Attempt) -> None:
    for case in _draw_cases(attempt):
        _judge_copy_in(attempt, case)


def parameters_come_out_of_the_slots(attempt: Attempt) -> None:
    for case in _draw_cases(attempt):
        _judge_copy_out(attempt, case)


def one_all_gather_carries_all(attempt: Attempt) -> None:
    for case in _draw_cases(attempt):
        _judge_unshard(attempt, case)
    if attempt.world_size in SUBGROUPS:
        _judge_unshard(attempt, Case(((3, 2), (4,)), in_subgroup=True))
