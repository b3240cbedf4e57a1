"""Judge ShardedFlatParameter: parameters have memory only while they are unsharded."""

import contextlib
import inspect
from dataclasses import dataclass, field
from functools import partial
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn

from shared.checks.engine.attempts import Attempt
from shared.checks.engine.candidate import device_here
from shared.checks.engine.compare import describe_calls, first_difference, nearly_equal, total_of
from shared.checks.engine.failures import Wrong
from shared.checks.engine.footprint import living_bytes, settled_bytes
from shared.checks.engine.sharded.flat_layout import Shapes, draw_shapes
from shared.checks.engine.sharded.unit_training import has_memory
from shared.checks.engine.sharded.wire import Flat, judge_rounds
from shared.checks.engine.subgroups import SUBGROUPS, called_alone, join_subgroup, members_of
from shared.wire import completion, instrumentation

_HINT_ON_STORAGE = "Autograd saved views of the storage. Hint: does unshard() write into that same storage again?"


@dataclass(frozen=True)
class Case:
    shapes: Shapes
    compute_dtype: torch.dtype | None = None
    trainable: bool = True

    def __str__(self) -> str:
        parts = [str(self.shapes), f"compute_dtype={self.compute_dtype}" if self.compute_dtype else ""]
        return ", ".join([each for each in parts if each] + ["frozen"] * (not self.trainable))


PLAIN = Case(Shapes(((5,), (2, 2), (2,))))


def _draw_cases(attempt: Attempt) -> list[Case]:
    five, many, *rest = draw_shapes(attempt)
    cases = [Case(five, torch.bfloat16), Case(many), Case(many, torch.float32, False), *map(Case, rest)]
    if attempt.world_size in SUBGROUPS:
        cases.append(Case(Shapes(((4,), (3, 2)), in_subgroup=True)))
    return cases


class _Waits(completion.Watcher):
    """Counts how often this rank waits for a collective."""

    def __init__(self):
        super().__init__()
        self.count = 0

    def waited(self, work_id, began) -> None:
        self.count += 1


def _unshard(flat) -> tuple[object, bool]:
    """Unshard completely. Return the handle, and whether unshard() itself has waited.

    In that case, do not wait again, because gloo never completes a second wait for the same receive.
    """
    waits = _Waits()
    with completion.watching(waits):
        handle = flat.unshard()
    if hasattr(handle, "wait") and not waits.count:
        handle.wait()
    return handle, waits.count > 0


@dataclass
class Sharded:
    building: list[instrumentation.Call]
    shard: torch.Tensor
    is_parameter: bool
    requires_grad: bool
    keeps_shapes: bool
    dtype: torch.dtype  # of flat_param
    dtypes: set[torch.dtype]  # of the parameters
    sent: list[torch.Tensor] = field(default_factory=list)  # the shard, in each unshard()
    unsharded: list[list[torch.Tensor]] = field(default_factory=list)  # the parameters after it; [] without memory
    calls: list[instrumentation.Call] = field(default_factory=list)  # in the last unshard()
    waits: bool = False  # whether unshard() has waited
    has_handle: bool = True  # whether unshard() has returned a handle
    records: bool = False  # whether autograd has recorded unshard()
    same_storage: bool = False
    gradients: list[torch.Tensor | None] = field(default_factory=list)


def probe_shards(sharded, case: Case, seed: int) -> Sharded | None:
    """Shard parameters, change the shard, unshard, reshard, and unshard again."""
    group, member = join_subgroup(case.shapes.in_subgroup)
    if not member:
        return None
    parameters = [nn.Parameter(each.to(device_here()), case.trainable) for each in case.shapes.values(seed)]
    shapes = [each.shape for each in parameters]
    with instrumentation.listening() as building:
        flat = sharded(parameters, group, case.compute_dtype)
    storage = flat.flat_param.untyped_storage()
    found = Sharded(
        building,
        flat.shard.detach().cpu().clone(),
        is_parameter=isinstance(flat.shard, nn.Parameter),
        requires_grad=flat.shard.requires_grad,
        keeps_shapes=[each.shape for each in parameters] == shapes,
        dtype=flat.flat_param.dtype,
        dtypes={each.dtype for each in parameters},
    )
    for round_ in range(2):
        with torch.no_grad():
            flat.shard += dist.get_rank(group) + round_
        sent = flat.shard.detach().cpu().clone()
        with instrumentation.listening() as found.calls:
            handle, found.waits = _unshard(flat)
            found.has_handle = hasattr(handle, "wait")
            if not found.has_handle:
                return found
        found.records = flat.flat_param.requires_grad
        there = all(has_memory(each) for each in parameters)
        values = [each.detach().cpu().clone() for each in parameters] if there else []
        found.sent.append(sent)
        found.unsharded.append(values)
        if not there:
            break
        if round_ == 0:
            same = flat.flat_param.untyped_storage()._cdata == storage._cdata
            outputs = [(each * each).sum() for each in parameters]
            flat.reshard()
    # The tensors saved for backward are views of the storage that was used in forward.
    found.same_storage = there and same and flat.flat_param.untyped_storage()._cdata == storage._cdata
    if found.same_storage and case.trainable:
        total_of(outputs).backward()
        found.gradients = [None if each.grad is None else each.grad.cpu() for each in parameters]
    return found


def _try(attempt: Attempt, case: Case) -> tuple[dict[int, Sharded], list[torch.Tensor], int]:
    """Return, by global rank, what was found; the first rank's values; elements per rank."""
    seeds = [attempt.draw_seed() for _ in range(attempt.world_size)]
    members = members_of(attempt, case.shapes.in_subgroup)
    context = called_alone(attempt) if case.shapes.in_subgroup else str(case)
    found = attempt.run(probe_shards, case, per_rank=[(seed,) for seed in seeds], context=context)
    values = case.shapes.values(seeds[members[0]])
    return {rank: found[rank] for rank in members}, values, -(-case.shapes.numbers // len(members))


def _expect(rank: int, evidence: str, holds: bool, hint: str) -> None:
    if not holds:
        raise Wrong({rank: evidence}, hint)


def plain_parameters_are_unsharded_and_resharded(attempt: Attempt) -> None:
    """Try three parameters of one dtype."""
    _judge_start(attempt, PLAIN)
    _judge_unsharded(attempt, PLAIN)


def shards_hold_the_first_ranks_values(attempt: Attempt) -> None:
    for case in _draw_cases(attempt):
        _judge_start(attempt, case)


def _judge_start(attempt: Attempt, case: Case) -> None:
    found, values, n = _try(attempt, case)
    flat = torch.cat([each.flatten() for each in values])
    flat = torch.cat([flat, flat.new_zeros(n * len(found) - len(flat))])
    for index, (rank, result) in enumerate(found.items()):
        expected, shard = flat.view(len(found), n)[index], result.shard
        evidence = f"{case}: shard is not an nn.Parameter"
        _expect(rank, evidence, result.is_parameter, "Hint: what kind of tensor does an optimizer accept?")
        evidence = f"{case}: shard.requires_grad is {result.requires_grad}; expected {case.trainable}"
        _expect(rank, evidence, result.requires_grad == case.trainable, "Hint: are the parameters trainable or frozen?")
        evidence = f"{case}: shard has dtype {shard.dtype}; expected {expected.dtype}"
        _expect(
            rank, evidence, shard.dtype == expected.dtype, "Hint: in which dtype should the optimizer update the shard?"
        )
        if not torch.equal(shard, expected):
            evidence = f"{case}: shard is wrong: {first_difference(shard, expected, 0.0)}"
            hint = "Hint: from which rank do the initial values come, and which of them belong to this rank's shard?"
            raise Wrong({rank: evidence}, hint)
        most = Flat(case.shapes.numbers, expected.itemsize).filled_bytes(len(found))
        evidence = f"{case}, in the constructor: {describe_calls(result.building)}; expected at most {most} bytes"
        sent = sum(call.payload_bytes for call in result.building)
        _expect(rank, evidence, sent <= most, "Hint: how many times is each element sent?")
        broadcasts = sum(call.op == "broadcast" for call in result.building)
        evidence = f"{case}, in the constructor: {broadcasts} broadcasts; expected one"
        _expect(rank, evidence, broadcasts <= 1, "Hint: which tensor holds the values of all parameters?")


def unshard_gathers_every_shard(attempt: Attempt) -> None:
    cases = _draw_cases(attempt)
    for case in cases:
        _judge_unsharded(attempt, case)
    _judge_dtypes(attempt, cases[0])


def _judge_unsharded(attempt: Attempt, case: Case) -> None:
    found, values, _ = _try(attempt, case)
    dtype = case.compute_dtype or case.shapes.dtype
    for rank, result in found.items():
        evidence = f"{case}: unshard() does not return a handle with wait()"
        _expect(rank, evidence, result.has_handle, "Hint: what does launch_all_gather() return?")
        _expect(rank, f"{case}: the parameters' shapes have changed", result.keeps_shapes, "")
        evidence = f"{case}: flat_param has dtype {result.dtype}; expected {dtype}"
        _expect(rank, evidence, result.dtype == dtype, "Hint: in which dtype should the model compute?")
        dtypes = ", ".join(sorted(map(str, result.dtypes)))
        evidence = f"{case}: flat_param has dtype {dtype}, but the parameters have dtype {dtypes}"
        _expect(rank, evidence, result.dtypes == {dtype}, "Hint: of which tensor are the parameters slices?")
        for round_, computed in enumerate(result.unsharded, 1):
            evidence = f"{case}, after unshard() number {round_}"
            hint = "Hint: what does flat_param need before an all-gather can write into it?"
            _expect(rank, f"{evidence}: the parameters have no memory", bool(computed), hint)
            full = torch.cat([each.sent[round_ - 1] for each in found.values()]).to(dtype)
            sizes = [each.numel() for each in values]
            for number, (expected, value) in enumerate(zip(full[: sum(sizes)].split(sizes), computed, strict=True)):
                if not torch.equal(value.flatten(), expected):
                    evidence = (
                        f"{evidence}: parameter {number} is wrong: {first_difference(value.flatten(), expected, 0.0)}"
                    )
                    hint = "Hint: which tensor does each rank send, and of which tensor are the parameters slices?"
                    raise Wrong({rank: evidence}, hint)
    calls = {rank: result.calls for rank, result in found.items()}
    judge_rounds(calls, [Flat(case.shapes.numbers, dtype.itemsize)], 1, f"{case}, unshard()")
    for rank, result in found.items():
        evidence = f"{case}: after unshard(), flat_param requires a gradient, because autograd has recorded it"
        _expect(rank, evidence, not result.records, "Hint: which tensor that you send requires a gradient?")
        evidence = f"{case}: unshard() waits for its all-gather; expected it to return at once"
        _expect(rank, evidence, not result.waits, "Hint: who waits for the handle that unshard() returns?")


def probe_dtypes(sharded, case: Case, seed: int) -> list[tuple[torch.dtype, torch.dtype]]:
    """Return the dtypes that unshard() passes to launch_all_gather: of the shard that is sent, and of flat_param."""
    parameters, dtypes = [nn.Parameter(each.to(device_here())) for each in case.shapes.values(seed)], []
    built = sharded(parameters, None, case.compute_dtype)

    def noted(launch, flat, shard, group=None):
        dtypes.append((shard.dtype, flat.dtype))
        return launch(flat, shard, group)

    with contextlib.ExitStack() as patches:
        for names in _namespaces_of(sharded):  # unshard() may call an inherited method that launches
            if launch := names.get("launch_all_gather"):
                patches.enter_context(mock.patch.dict(names, {"launch_all_gather": partial(noted, launch)}))
        _unshard(built)
    return dtypes


def _namespaces_of(cls: type) -> list[dict]:
    """Return the global variables of the modules that define the methods of a class."""
    functions = [each for base in cls.__mro__ for each in vars(base).values() if inspect.isfunction(each)]
    return list({id(each.__globals__): each.__globals__ for each in functions}.values())


def _judge_dtypes(attempt: Attempt, case: Case) -> None:
    per_rank = [(attempt.draw_seed(),) for _ in range(attempt.world_size)]
    for rank, dtypes in enumerate(attempt.run(probe_dtypes, case, per_rank=per_rank, context=str(case))):
        for sent, filled in dtypes:
            evidence = f"{case}: unshard() sends {sent} to fill a flat_param of {filled}, which NCCL rejects"
            _expect(rank, evidence, sent == filled, "Hint: which dtype does the shard have, and which one flat_param?")


def backward_finds_what_it_saved(attempt: Attempt) -> None:
    """Run forward, reshard(), unshard() and backward: gradients must use the values that were unsharded last."""
    for case in _draw_cases(attempt):
        for rank, result in _try(attempt, case)[0].items():
            evidence = (
                f"{case}: after reshard() and unshard(), the parameters are in a different storage than in forward"
            )
            _expect(rank, evidence, result.same_storage, _HINT_ON_STORAGE)
            for number, gradient in enumerate(result.gradients):
                expected = 2 * result.unsharded[1][number]
                if gradient is None or not nearly_equal(gradient, expected, 1e-2):
                    was = "None" if gradient is None else first_difference(gradient, expected, 1e-2)
                    evidence = f"{case}: in backward, the gradient of p·p for parameter {number}: {was}"
                    raise Wrong({rank: evidence}, _HINT_ON_STORAGE)


def probe_footprint(sharded, case: Case, most: dict[str, int], seed: int) -> dict[str, int]:
    """Return the bytes of all living tensors at each moment. `most` has the expected bytes by moment."""
    before_bytes, found = living_bytes(), {}
    parameters = [nn.Parameter(each.to(device_here())) for each in case.shapes.values(seed)]
    for moment in most:
        if moment == "when built":
            flat = sharded(parameters, None, case.compute_dtype)
        elif moment == "after unshard()":
            _unshard(flat)
        else:
            flat.reshard()
        found[moment] = settled_bytes(1.01 * most[moment], before_bytes)
    return found


def only_the_shard_has_memory(attempt: Attempt) -> None:
    for case in (Case(Shapes(((300, 100), (70,), (200, 50)))), Case(Shapes(((300, 100),)), torch.bfloat16)):
        per_rank = [(attempt.draw_seed(),) for _ in range(attempt.world_size)]
        full = Flat(case.shapes.numbers, (case.compute_dtype or case.shapes.dtype).itemsize)
        shard_bytes = Flat(case.shapes.numbers, 4).filled_bytes(attempt.world_size) // attempt.world_size
        full_bytes = full.filled_bytes(attempt.world_size)
        most = {
            "when built": shard_bytes,
            "after unshard()": shard_bytes + full_bytes,
            "after reshard()": shard_bytes,
        }
        for rank, held in enumerate(attempt.run(probe_footprint, case, most, per_rank=per_rank)):
            for moment, nbytes in held.items():
                if nbytes > 1.01 * most[moment]:
                    evidence = f"{case}, {moment}: {nbytes:,} bytes are held; expected {most[moment]:,}"
                    raise Wrong(
                        {rank: evidence}, "Hint: which storage still has memory, and is it needed at this moment?"
                    )
