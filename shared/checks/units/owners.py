"""Judge owned_parameters: which unit unshards and reshards which parameter."""

import torch
from torch import nn

from shared.checks.engine.framework import Attempt, Wrong

WIDTH = 3


def _linear(frozen: bool = False) -> nn.Linear:
    return nn.Linear(WIDTH, WIDTH, bias=False).requires_grad_(not frozen)


def _chain() -> nn.Module:
    """Build units with a common prefix, a parameter of the module itself, and a frozen one."""
    module = nn.Module()
    module.gain = nn.Parameter(torch.ones(1))
    module.block = nn.Sequential(_linear(), _linear(frozen=True))
    module.block2 = _linear()
    module.blocks = nn.ModuleList(_linear() for _ in range(11))
    return module


def _nested() -> nn.Module:
    module = nn.Module()
    module.outer = nn.Module()
    module.outer.own, module.outer.inner = _linear(), nn.Module()
    module.outer.inner.own, module.outer.inner.deep = _linear(), _linear()
    module.out = _linear()
    return module


def _tied() -> nn.Module:
    """Tie weights across units, with the root, inside a unit, and between a unit and a nested one."""
    module = nn.Module()
    module.a, module.b, module.c = (nn.Sequential(_linear(), _linear(), _linear()) for _ in range(3))
    module.out = _linear()
    module.b[0].weight = module.a[0].weight
    module.out.weight = module.c[1].weight
    module.c[2].weight = module.c[0].weight
    module.c.inner = _linear()
    module.c.inner.weight = module.c[0].weight
    return module


def _shared() -> nn.Module:
    """Build a unit with two paths, one of them inside another unit, and a unit without parameters."""
    module = nn.Module()
    module.first = _linear()
    module.again = module.first
    module.pair = nn.Sequential(_linear(), module.first)
    module.silent = nn.Tanh()
    return module


# description: builder, names of the units, and names of the parameters by their owner's name ("" is the module)
CASES = {
    "sibling units whose names have a common prefix": (
        _chain,
        ["blocks.10", "block", "blocks.1"],
        {
            "blocks.10": ["blocks.10.weight"],
            "block": ["block.0.weight", "block.1.weight"],
            "blocks.1": ["blocks.1.weight"],
            "": ["gain", "block2.weight", *(f"blocks.{n}.weight" for n in range(10) if n != 1)],
        },
    ),
    "no units": (
        _nested,
        [],
        {"": ["outer.own.weight", "outer.inner.own.weight", "outer.inner.deep.weight", "out.weight"]},
    ),
    "a unit inside a unit inside a unit": (
        _nested,
        ["outer", "outer.inner", "outer.inner.deep"],
        {
            "outer": ["outer.own.weight"],
            "outer.inner": ["outer.inner.own.weight"],
            "outer.inner.deep": ["outer.inner.deep.weight"],
            "": ["out.weight"],
        },
    ),
    "tied parameters": (
        _tied,
        ["a", "b", "c"],
        {
            "a": ["a.1.weight", "a.2.weight"],
            "b": ["b.1.weight", "b.2.weight"],
            "c": ["c.0.weight"],
            "": ["a.0.weight", "c.1.weight"],
        },
    ),
    "a parameter tied between a unit and one inside it": (
        _tied,
        ["c.inner", "c"],
        {
            "c.inner": [],
            "c": [],
            "": [
                *(f"{x}.{n}.weight" for x in "ab" for n in range(3) if (x, n) != ("b", 0)),
                "c.0.weight",
                "c.1.weight",
            ],
        },
    ),
    "a unit under two paths, and one without parameters": (
        _shared,
        ["silent", "pair", "first"],
        {"silent": [], "pair": ["pair.0.weight"], "first": ["first.weight"], "": []},
    ),
}


PLAIN = "a unit inside a unit inside a unit"


def probe_owned(owned_parameters, case: str, as_iterator: bool) -> dict:
    """Return the names of the keys, and of the parameters each owns. A tied parameter goes by its first name."""
    build, units, _ = CASES[case]
    module = build()
    named = {each: name for name, each in module.named_modules()}
    names = {each: name for name, each in module.named_parameters()}
    given = [module.get_submodule(name) for name in units]
    owned = owned_parameters(module, iter(given) if as_iterator else given)
    keys = [named.get(key, "a key that is not in the module") for key in owned]
    return {"keys": keys, "owned": [[names[each] for each in its] for its in owned.values()]}


def innermost_units_own(attempt: Attempt) -> None:
    _judge(attempt, PLAIN)


def each_has_one_owner(attempt: Attempt) -> None:
    for case in CASES:
        _judge(attempt, case)


def _judge(attempt: Attempt, case: str) -> None:
    _, units, expected_owned = CASES[case]
    result = attempt.run(probe_owned, case, attempt.random.random() < 0.5, context=case)[0]
    if result["keys"] != [*units, ""]:
        evidence = f"{case}: the keys are {_names(result['keys'])}; expected {_names([*units, ''])}"
        raise Wrong(evidence, "The keys must be all units in the given order, followed by the module.")
    for key, found in zip(result["keys"], result["owned"], strict=True):
        if sorted(found) != sorted(expected_owned[key]):
            actual, expected = _names(found) or "nothing", _names(expected_owned[key]) or "nothing"
            hint = "Hint: which units contain this parameter, and which of them is the innermost?"
            if "tied" in case:
                hint = "Hint: which names does a tied parameter have, and which unit contains each of them?"
            raise Wrong(f"{case}: {_name(key)} owns {actual}; expected {expected}", hint)


def _name(key: str) -> str:
    return key or "the module"


def _names(names: list[str]) -> str:
    return ", ".join(map(_name, names))


def probe_strangers(owned_parameters) -> list[tuple[str, str]]:
    """Return the errors for a unit outside the module, and for the module itself."""
    found = []
    for pick in (lambda module: _linear(), lambda module: module):
        module = _nested()
        try:
            owned_parameters(module, [module.outer, pick(module)])
        except Exception as error:
            found.append((type(error).__name__, str(error)))
        else:
            found.append(("nothing", ""))
    return found


def strangers_are_rejected(attempt: Attempt) -> None:
    result = attempt.run(probe_strangers)[0]
    for what, (kind, message) in zip(("outside the module", "that is the module itself"), result, strict=True):
        if kind != "ValueError" or not message.strip():
            does = "is accepted" if kind == "nothing" else f"raises {kind}({message[:80]!r})"
            raise Wrong(f"a unit {what} {does}; expected a ValueError with a message")
