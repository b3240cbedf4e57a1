"""Check exercises 17.2, 17.3 and 17.9: the rules along one axis.

Which rules are right is found out by trying them (see trying.py).
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from shared.checks.engine.attempts import Attempt
from shared.checks.engine.compare import first_difference, total_of
from shared.checks.engine.failures import Wrong
from shared.checks.gspmd.cases import EINSUMS, EQUATIONS, MATMUL, beside, describe, describe_mesh
from shared.checks.gspmd.trying import every_placement, rules_of
from shared.placements import Equation, Mesh, Partial, Placement, Replicate, Shard, Term, dim_of

# -- check exercise 17.1: what each rank holds of a tensor


_HINTS = {
    Shard: "Hint: along which dimension is the tensor divided, and which shard belongs to this rank?",
    Replicate: "Hint: how much of a replicated tensor does each rank hold?",
    Partial: "Hint: the tensor is the sum over the ranks. What do the ranks hold together?",
}


@dataclass
class Parts:
    """What local_part returns for each placement and rank, and whole_from for the parts of each placement."""

    parts: list[list[Any]]
    wholes: list[Any]
    changed: bool  # whether the tensor has changed


@dataclass
class Joined:
    whole: Any
    changed: bool  # whether a term has changed


def probe_parts(local_part, size: int, placements: list[Placement], tensor: torch.Tensor) -> Parts:
    """Cut a tensor for every rank, and join the parts."""
    whole_from = beside(local_part, "whole_from")
    untouched = tensor.clone()
    parts = [[local_part(tensor, each, index, size) for index in range(size)] for each in placements]
    wholes = [whole_from(list(each), placement) for each, placement in zip(parts, placements, strict=True)]
    return Parts(parts, wholes, not torch.equal(tensor, untouched))


def probe_terms(local_part, terms: list[torch.Tensor]) -> Joined:
    own = [term.clone() for term in terms]
    whole = beside(local_part, "whole_from")(own, Partial())
    return Joined(whole, not all(map(torch.equal, own, terms)))


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
    _judge_parts(attempt, 2, (4, 2), [Shard(0), Shard(1), Replicate(), Partial()])


def many_ranks_hold_tensors(attempt: Attempt) -> None:
    for size in (1, 2, 3, 4):
        for shape in ((12,), (12, 24, 12)):
            _judge_parts(attempt, size, shape, every_placement(len(shape)))
    terms = [torch.randn(3, 2, dtype=torch.float64) for _ in range(3)]
    found = attempt.run(probe_terms, terms, context="whole_from() of three terms")[0]
    if not _same(found.whole, total_of(terms)):
        raise Wrong("whole_from() of three terms of a Partial is not their sum", _HINTS[Partial])
    if found.changed:
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


def _judge_parts(attempt: Attempt, size: int, shape: tuple[int, ...], placements: list[Placement]) -> None:
    draw = torch.Generator().manual_seed(attempt.draw_seed())
    tensor = torch.randn(shape, generator=draw, dtype=torch.float64)
    tried = f"a tensor of shape {list(shape)} on {describe_mesh(Mesh((size,)))}"
    found = attempt.run(probe_parts, size, placements, tensor, context=tried)[0]
    if found.changed:
        raise Wrong(f"{tried}: your function has changed its argument", "Hint: which line writes to `tensor`?")
    for placement, parts, whole in zip(placements, found.parts, found.wholes, strict=True):
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


Found = tuple[tuple[Placement, ...], Placement]
_HINT_ON_TERMS = "Hint: each rank applies the operation to its own term. What is the sum of the results?"
_HINT_ON_SHARDS = "Hint: if each rank computes with its shards alone, what does its result contain?"
_RESHAPES = ("b(hd)->bhd, h=4, d=8", "bhd->b(hd), h=4, d=6", "(ab)c->abc, a=8, b=2", "a(bcd)->abcd, b=4, c=2, d=6")
_RESHAPES += ("ab(cd)->abcd, c=8, d=4", "(ab)(cd)->abcd, a=4, b=6, c=8, d=2", "abcd->(ab)(cd), a=4, b=6, c=8, d=2")


def probe_rules(rules: Callable, equations: list[str]) -> list[list[Found]]:
    """Return the rules of each equation as tuples."""
    found = [rules(Equation.parse(text)) for text in equations]
    return [[(tuple(rule.inputs), rule.output) for rule in each] for each in found]


def a_matrix_product_by_letters(attempt: Attempt) -> None:
    found = _judge(attempt, [MATMUL], partial=False)[0]
    # Which of two equal plans exercise 17.5 finds first depends on the order of the rules.
    equation = Equation.parse(MATMUL)
    order = ["".join(_letters_of(rule, equation)) for rule in found]
    if order != ["", *equation.letters]:
        names = ", ".join(letter or "everything replicated" for letter in order)
        message = f"{MATMUL}: all rules are right, but they are in this order: {names}"
        raise Wrong(message, "Hint: in which order does `equation.letters` have the letters, and which rule is first?")


def other_operations_by_letters(attempt: Attempt) -> None:
    _judge(attempt, _shuffled(attempt), partial=False)


def a_matrix_product_of_terms(attempt: Attempt) -> None:
    _judge(attempt, [MATMUL], partial=True)


def other_operations_of_terms(attempt: Attempt) -> None:
    _judge(attempt, _shuffled(attempt), partial=True)


def columns_become_heads(attempt: Attempt) -> None:
    _judge(attempt, [f"reshape: {_RESHAPES[0]}"], partial=False)


def other_reshapes(attempt: Attempt) -> None:
    _judge(attempt, [f"reshape: {each}" for each in _RESHAPES], partial=False)


def _shuffled(attempt: Attempt) -> list[str]:
    """List the equations in random order, and some of them with other letters."""
    equations = list(EQUATIONS)
    attempt.random.shuffle(equations)
    renamed = str.maketrans("ijk", "".join(attempt.random.sample("pqrstuvw", 3)))
    return equations + [each.translate(renamed) for each in EINSUMS]


def _judge(attempt: Attempt, equations: list[str], partial: bool) -> list[list[Found]]:
    """Compare the rules of each equation with those that work. Returns the rules.

    Args:
        equations: The equations.
        partial: Whether to compare the rules with Partial inputs, or all others.
    """
    every = attempt.run(probe_rules, equations, context=", ".join(equations[:1]) if len(equations) == 1 else "")[0]
    for text, found in zip(equations, every, strict=True):
        right = {rule for rule in rules_of(text) if (Partial() in rule[0]) == partial}
        for rule in found:
            if rule in right:
                continue
            if rule not in rules_of(text):
                raise Wrong(f"{text}: the rule {_named(rule)} gives wrong results", _hint_on_wrong(text, rule))
            raise Wrong(f"{text}: the rule {_named(rule)} is right, but it belongs to the other exercise")
        if len(found) != len(set(found)):
            raise Wrong(f"{text}: there are two equal rules", "Hint: how many rules does each letter have?")
        if missing := right - set(found):
            raise Wrong(f"{text}: {_count(missing)} missing", _hint_on_missing(text, missing, partial))
    return every


def _hint_on_wrong(text: str, rule: Found) -> str:
    """Point at the inputs if they do not belong to one letter, and otherwise at the output."""
    equation, (inputs, output) = Equation.parse(text), rule
    if len(inputs) != len(equation.inputs):
        return "Hint: how many inputs does the equation have?"
    if Partial() in inputs:
        return _HINT_ON_TERMS
    letters = _letters_of(rule, equation) or _sharded(equation.output, output)
    if len(letters) > 1:
        return f"The inputs are sharded along {' and '.join(letters)}. Hint: how many letters does one rule have?"
    for letter in letters:
        dims = [dim_of(letter, term) for term in equation.inputs]
        if inputs != tuple(Replicate() if dim is None else Shard(dim) for dim in dims):
            return f"Hint: which inputs have the letter {letter}, and in which dimension? (0 is a dimension, too.)"
    return _HINT_ON_SHARDS


def _letters_of(rule: Found, equation: Equation) -> list[str]:
    """Return the letters along which a rule shards the inputs, sorted."""
    pairs = zip(equation.inputs, rule[0], strict=True)
    return sorted({letter for term, placement in pairs for letter in _sharded(term, placement)})


def _sharded(term: Term, placement: Placement) -> list[str]:
    """Return the letter along which a placement shards a tensor, in a list that is empty if it does not."""
    dim = getattr(placement, "dim", None)
    return [letters[0] for each, letters in enumerate(term) if each == dim]


def _count(missing: set) -> str:
    return f"{len(missing)} rule{' is' if len(missing) == 1 else 's are'}"


def _hint_on_missing(text: str, missing: set[Found], partial: bool) -> str:
    equation = Equation.parse(text)
    if partial:
        return f"Hint: which inputs of {equation.operation} may be Partial, and how many of them at the same time?"
    rule = min(missing, key=str)
    if isinstance(rule[1], Partial):
        return "Hint: what does the result become if the letter is not in it?"
    letters = _letters_of(rule, equation)
    if not letters:
        return "Hint: which rule has no shards at all?"
    return f"Hint: can the inputs be sharded along {letters[0]}, and which inputs have this letter?"


def _named(rule: Found) -> str:
    return f"{', '.join(map(describe, rule[0]))} → {describe(rule[1])}"


# -- the shape of a reshape


def probe_shapes(reshape_rules, asked: list[tuple[str, tuple[int, ...]]]) -> list[list[int]]:
    local_shape = beside(reshape_rules, "local_shape")
    return [list(local_shape(Equation.parse(text), shape)) for text, shape in asked]


def shapes_of_shards(attempt: Attempt) -> None:
    asked = [
        ("reshape: b(hd)->bhd, h=4, d=8", (3, 32), [3, 4, 8]),
        ("reshape: b(hd)->bhd, h=4, d=8", (3, 16), [3, 2, 8]),
        ("reshape: bhd->b(hd), h=4, d=8", (3, 1, 8), [3, 8]),
        ("reshape: (ab)(cd)->abcd, a=6, b=5, c=8, d=2", (10, 16), [2, 5, 8, 2]),
        ("reshape: (ab)(cd)->abcd, a=6, b=5, c=8, d=2", (30, 4), [6, 5, 2, 2]),
        ("reshape: a(bcd)->abcd, b=4, c=3, d=2", (7, 12), [7, 2, 3, 2]),
        ("reshape: abcd->a(bcd), b=4, c=3, d=2", (1, 2, 3, 2), [1, 12]),
    ]
    found = attempt.run(probe_shapes, [(text, shape) for text, shape, _ in asked])[0]
    for (text, shape, expected), shape_found in zip(asked, found, strict=True):
        if shape_found != expected:
            hint = "Hint: which of the equation's lengths are also right for this rank's tensor?"
            raise Wrong(
                f"{text} of a local tensor {list(shape)}: the shape is {shape_found}, expected {expected}", hint
            )
