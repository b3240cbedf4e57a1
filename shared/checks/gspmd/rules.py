"""Check exercises 17.2, 17.3 and 17.9: the rules along one axis.

Which rules are right is found out by trying them (see trying.py).
"""

from collections.abc import Callable

from shared.checks.engine.attempts import Attempt
from shared.checks.engine.failures import Wrong
from shared.checks.gspmd.cases import EINSUMS, EQUATIONS, MATMUL, beside, describe
from shared.checks.gspmd.trying import rules_of
from shared.placements import Equation, Partial, Placement, Replicate, Shard, Term, dim_of

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
        attempt: The attempt.
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
