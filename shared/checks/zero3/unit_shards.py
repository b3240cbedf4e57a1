"""Judging ShardedParameters: parameters that have memory while they are gathered, and only then."""

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn

from shared.checks.engine.candidate import device_here
from shared.checks.engine.compare import close, describe_calls, first_difference
from shared.checks.engine.footprint import living_bytes, settled_bytes
from shared.checks.engine.framework import Attempt, Wrong
from shared.checks.engine.sharded.flat_layout import Shapes, draw_shapes
from shared.checks.engine.sharded.unit_training import has_memory
from shared.checks.engine.sharded.wire import Flat, judge_rounds
from shared.checks.engine.subgroups import SUBGROUPS, called_alone, join_subgroup, members_of
from shared.wire import instrumentation


@dataclass(frozen=True)
class Case:
    shapes: Shapes
    compute_dtype: torch.dtype | None = None
    trainable: bool = True

    def __str__(self) -> str:
        parts = [str(self.shapes), f"compute_dtype={self.compute_dtype}" if self.compute_dtype else ""]
        return ", ".join([each for each in parts if each] + ["frozen"] * (not self.trainable))


def _draw_cases(attempt: Attempt) -> list[Case]:
    five, many, *rest = draw_shapes(attempt)
    cases = [Case(five, torch.bfloat16), Case(many), Case(many, torch.float32, False), *map(Case, rest)]
    if attempt.world_size in SUBGROUPS:
        cases.append(Case(Shapes(((4,), (3, 2)), in_subgroup=True)))
    return cases


def probe_shards(sharded, case: Case, seed: int) -> dict:
    """Shard parameters, write into the part, gather, free, gather again. → what was there"""
    group, member = join_subgroup(case.shapes.in_subgroup)
    if not member:
        return {"outside": True}
    parameters = [nn.Parameter(each.to(device_here()), case.trainable) for each in case.shapes.values(seed)]
    shapes = [each.shape for each in parameters]
    with instrumentation.listening() as building:
        home = sharded(parameters, group, case.compute_dtype)
    found = {
        "building": building,
        "shard": home.shard.detach().cpu().clone(),
        "is a parameter": isinstance(home.shard, nn.Parameter) and home.shard.requires_grad == case.trainable,
        "has its own memory": home.shard.untyped_storage()._cdata != home.flat.untyped_storage()._cdata,
        "keeps shapes": [each.shape for each in parameters] == shapes,
        "freed": [home.flat.untyped_storage().nbytes()],
        "dtype": {home.flat.dtype, *(each.dtype for each in parameters)},
        "gathered": [],
    }
    storage = home.flat.untyped_storage()._cdata
    for round_ in range(2):
        with torch.no_grad():
            home.shard += dist.get_rank(group) + round_
        found["sent"] = home.shard.detach().cpu().clone()
        with instrumentation.listening() as found["calls"]:
            handle = home.gather()
            if not hasattr(handle, "wait"):
                return found | {"handle": False}
            handle.wait()
        there = all(has_memory(each) for each in parameters)
        values = [each.detach().cpu().clone() for each in parameters] if there else None
        found["gathered"].append((found["sent"], values))
        if not there:
            break
        if round_ == 0:
            same = home.flat.untyped_storage()._cdata == storage
            outputs = [(each * each).sum() for each in parameters]
            home.free()
            found["freed"].append(home.flat.untyped_storage().nbytes())
    # What is saved for backward is a window on the storage that was there in forward.
    found["same windows"] = there and same and home.flat.untyped_storage()._cdata == storage
    if found["same windows"] and case.trainable:
        sum(outputs).backward()
        found["gradients"] = [None if each.grad is None else each.grad.cpu() for each in parameters]
    return found


def _try(attempt: Attempt, case: Case) -> tuple[dict[int, dict], list[torch.Tensor], int]:
    """→ by global rank, what was found; the first rank's values; numbers per rank"""
    seeds = [attempt.draw_seed() for _ in range(attempt.world_size)]
    members = members_of(attempt, case.shapes.in_subgroup)
    context = called_alone(attempt) if case.shapes.in_subgroup else str(case)
    found = attempt.run(probe_shards, case, per_rank=[(seed,) for seed in seeds], context=context)
    values = case.shapes.values(seeds[members[0]])
    return {rank: found[rank] for rank in members}, values, -(-case.shapes.numbers // len(members))


def _expect(rank: int, said: str, holds: bool, hint: str) -> None:
    if not holds:
        raise Wrong({rank: said}, hint)


def parts_of_the_first_ranks_values(attempt: Attempt) -> None:
    for case in _draw_cases(attempt):
        found, values, part = _try(attempt, case)
        flat = torch.cat([each.flatten() for each in values])
        flat = torch.cat([flat, flat.new_zeros(part * len(found) - len(flat))])
        for place, (rank, result) in enumerate(found.items()):
            want, shard = flat.view(len(found), part)[place], result["shard"]
            _expect(
                rank, f"{case}: shard is no nn.Parameter whose requires_grad is theirs", result["is a parameter"], ""
            )
            said = f"{case}: shard is of {shard.dtype}; expected {want.dtype}"
            _expect(rank, said, shard.dtype == want.dtype, "Look at: what does the optimizer compute with?")
            if not torch.equal(shard, want):
                said = f"{case}: shard, {first_difference(shard, want, 0.0)}"
                raise Wrong({rank: said}, "Look at: whose values do all ranks begin with, and which are this rank's?")
            most = Flat(case.shapes.numbers, want.itemsize).filled_bytes(len(found))
            said = f"{case}, when built: {describe_calls(result['building'])}; expected at most {most} bytes"
            sent = sum(call.payload_bytes for call in result["building"])
            _expect(rank, said, sent <= most, "Look at: is each number sent once?")


def gather_puts_values_in_place(attempt: Attempt) -> None:
    for case in _draw_cases(attempt):
        found, values, _ = _try(attempt, case)
        dtype = case.compute_dtype or case.shapes.dtype
        for rank, result in found.items():
            _expect(
                rank, "gather() gives back nothing to wait on", result.get("handle", True), "Look at: lab 07's gather()"
            )
            _expect(rank, f"{case}: the parameters' shapes change", result["keeps shapes"], "")
            said = f"{case}: flat and parameters are of {', '.join(map(str, result['dtype']))}; expected {dtype}"
            _expect(rank, said, result["dtype"] == {dtype}, "Look at: in which dtype does the model compute?")
            for round_, (_, computed) in enumerate(result["gathered"], 1):
                said = f"{case}, gather() number {round_}"
                parts = [each["gathered"][round_ - 1][0] for each in found.values()]
                whole = torch.cat(parts).to(dtype)
                hint = "Look at: what must flat have before anything can arrive in it?"
                _expect(rank, f"{said}: the parameters have no memory", computed is not None, hint)
                sizes = [each.numel() for each in values]
                for number, (piece, value) in enumerate(zip(whole[: sum(sizes)].split(sizes), computed, strict=True)):
                    if not torch.equal(value.flatten(), piece):
                        said = f"{said}: parameter {number}, {first_difference(value.flatten(), piece, 0.0)}"
                        raise Wrong(
                            {rank: said}, "Look at: which tensor is sent, and what are the parameters slices of?"
                        )
        calls = {rank: result["calls"] for rank, result in found.items()}
        judge_rounds(calls, [Flat(case.shapes.numbers, dtype.itemsize)], 1, f"{case}, gather()")


def backward_finds_its_windows(attempt: Attempt) -> None:
    """Forward, free(), gather(), backward: the gradient is that of the values which were gathered last."""
    for case in _draw_cases(attempt):
        for rank, result in _try(attempt, case)[0].items():
            hint = "Look at: autograd keeps windows on one storage. Is it still the one that is filled?"
            said = f"{case}: after free() and gather(), parameters lie in another storage than in forward"
            _expect(rank, said, result["same windows"], hint)
            for number, gradient in enumerate(result.get("gradients", ())):
                want = 2 * result["gathered"][1][1][number]
                if gradient is None or not close(gradient, want, 1e-2):
                    was = "None" if gradient is None else first_difference(gradient, want, 1e-2)
                    raise Wrong({rank: f"{case}: in backward, the gradient of p·p for parameter {number}: {was}"}, hint)


def probe_footprint(sharded, case: Case, most: dict[str, int], seed: int) -> dict[str, int]:
    """→ bytes of all that lives, by moment. most: how much is expected"""
    before_bytes, found = living_bytes(), {}
    parameters = [nn.Parameter(each.to(device_here())) for each in case.shapes.values(seed)]
    for moment in most:
        if moment == "when built":
            home = sharded(parameters, None, case.compute_dtype)
        elif moment == "gathered":
            home.gather().wait()
        else:
            home.free()
        found[moment] = settled_bytes(1.01 * most[moment], before_bytes)
    return found


def only_a_part_has_memory(attempt: Attempt) -> None:
    for case in (Case(Shapes(((300, 100), (70,), (200, 50)))), Case(Shapes(((300, 100),)), torch.bfloat16)):
        per_rank = [(attempt.draw_seed(),) for _ in range(attempt.world_size)]
        whole = Flat(case.shapes.numbers, (case.compute_dtype or case.shapes.dtype).itemsize)
        part = Flat(case.shapes.numbers, 4).filled_bytes(attempt.world_size) // attempt.world_size
        most = {"when built": part, "gathered": part + whole.filled_bytes(attempt.world_size), "after free()": part}
        for rank, held in enumerate(attempt.run(probe_footprint, case, most, per_rank=per_rank)):
            for moment, nbytes in held.items():
                if nbytes > 1.01 * most[moment]:
                    said = f"{case}, {moment}: {nbytes:,} bytes are held; expected {most[moment]:,}"
                    raise Wrong({rank: said}, "Look at: which storage still has memory, and who needs it now?")
