"""Check exercise 17.1: what each rank holds of a tensor."""

import torch

from shared.checks.engine.attempts import Attempt
from shared.checks.engine.compare import first_difference
from shared.checks.engine.failures import Wrong
from shared.checks.gspmd.cases import beside, describe, describe_mesh
from shared.checks.gspmd.trying import every_placement
from shared.placements import Mesh, Partial, Placement, Replicate, Shard

_HINTS = {
    Shard: "Hint: along which dimension is the tensor divided, and which shard belongs to this rank?",
    Replicate: "Hint: how much of a replicated tensor does each rank hold?",
    Partial: "Hint: the tensor is the sum over the ranks. What do the ranks hold together?",
}


def probe_parts(local_part, size: int, placements: list[Placement], tensor: torch.Tensor) -> dict:
    """Cut a tensor for every rank, and join the parts."""
    whole_from = beside(local_part, "whole_from")
    untouched = tensor.clone()
    parts = [[local_part(tensor, each, index, size) for index in range(size)] for each in placements]
    wholes = [whole_from(list(each), placement) for each, placement in zip(parts, placements, strict=True)]
    return {"parts": parts, "wholes": wholes, "changed": not torch.equal(tensor, untouched)}


def probe_terms(local_part, terms: list[torch.Tensor]) -> dict:
    own = [term.clone() for term in terms]
    whole = beside(local_part, "whole_from")(own, Partial())
    return {"whole": whole, "changed": not all(map(torch.equal, own, terms))}


def probe_rejections(local_part, asked: list[tuple]) -> list[str]:
    """Return what the function says about lengths that do not divide, or "" if it accepts them."""
    said = []
    for shape, placement, size in asked:
        try:
            for index in range(size):
                local_part(torch.zeros(shape), placement, index, size)
            said.append("")
        except ValueError as error:
            said.append(str(error) or "a ValueError without a message")
    return said


def two_ranks_hold_a_matrix(attempt: Attempt) -> None:
    _judge(attempt, 2, (4, 2), [Shard(0), Shard(1), Replicate(), Partial()])


def many_ranks_hold_tensors(attempt: Attempt) -> None:
    for size in (1, 2, 3, 4):
        for shape in ((12,), (12, 24, 12)):
            _judge(attempt, size, shape, every_placement(len(shape)))
    terms = [torch.randn(3, 2, dtype=torch.float64) for _ in range(3)]
    found = attempt.run(probe_terms, terms, context="whole_from() of three terms")[0]
    if not _same(found["whole"], sum(terms)):
        raise Wrong("whole_from() of three terms of a Partial is not their sum", _HINTS[Partial])
    if found["changed"]:
        raise Wrong("whole_from() of three terms changes its argument", "Hint: which line writes to one of `parts`?")


def lengths_that_do_not_divide(attempt: Attempt) -> None:
    asked = [((6, 4), Shard(0), 4), ((4, 5), Shard(1), 2), ((2, 3), Shard(0), 3), ((2, 9, 4), Shard(1), 4)]
    for (shape, placement, size), said in zip(asked, attempt.run(probe_rejections, asked)[0], strict=True):
        length, where = shape[placement.dim], describe_mesh(Mesh((size,)))
        tried = f"{describe(placement)} of a tensor of shape {list(shape)} on {where}"
        if not said:
            hint = "Hint: which ranks would get less than the others?"
            raise Wrong(f"{tried} is accepted; expected a ValueError", hint)
        if str(length) not in said or str(size) not in said:
            evidence = f"{tried}: the ValueError says {said!r}; expected it to name {length} and {size}"
            raise Wrong(evidence, "Hint: does its message name the length and the number of ranks?")


def _judge(attempt: Attempt, size: int, shape: tuple[int, ...], placements: list[Placement]) -> None:
    draw = torch.Generator().manual_seed(attempt.draw_seed())
    tensor = torch.randn(shape, generator=draw, dtype=torch.float64)
    tried = f"a tensor of shape {list(shape)} on {describe_mesh(Mesh((size,)))}"
    found = attempt.run(probe_parts, size, placements, tensor, context=tried)[0]
    if found["changed"]:
        raise Wrong(f"{tried}: your function has changed its argument", "Hint: which line writes to `tensor`?")
    for placement, parts, whole in zip(placements, found["parts"], found["wholes"], strict=True):
        name, hint = f"{describe(placement)} of {tried}", _HINTS[type(placement)]
        for index, part in enumerate(parts):
            expected = _expected(tensor, placement, index, size)
            if not _same(part, expected):
                raise Wrong(f"{name}, local_part for rank {index}: {_difference(part, expected)}", hint)
        if not _same(whole, tensor):
            raise Wrong(f"{name}, whole_from: {_difference(whole, tensor)}", hint)


def _expected(tensor: torch.Tensor, placement: Placement, index: int, size: int) -> torch.Tensor:
    if isinstance(placement, Shard):
        length = tensor.shape[placement.dim] // size
        return tensor.narrow(placement.dim, index * length, length)
    return torch.zeros_like(tensor) if isinstance(placement, Partial) and index else tensor


def _same(found, expected: torch.Tensor) -> bool:
    return isinstance(found, torch.Tensor) and found.shape == expected.shape and torch.allclose(found, expected)


def _difference(found, expected: torch.Tensor) -> str:
    if not isinstance(found, torch.Tensor):
        return f"expected a tensor, got {type(found).__name__}"
    return first_difference(found, expected)
