"""Judging owned_parameters: which unit gathers and frees which parameter."""

import torch
from torch import nn

from shared.checks.engine.framework import Attempt, Wrong

WIDTH = 3


def _linear(frozen: bool = False) -> nn.Linear:
    return nn.Linear(WIDTH, WIDTH, bias=False).requires_grad_(not frozen)


def _chain() -> nn.Module:
    """Names of which one begins another, parameters of the module's own, one frozen."""
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
    """Tied across units, with the root, inside one unit, and between a unit and one inside it."""
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
    """One unit at two places, one of them inside another unit; and a unit without parameters."""
    module = nn.Module()
    module.first = _linear()
    module.again = module.first
    module.pair = nn.Sequential(_linear(), module.first)
    module.silent = nn.Tanh()
    return module


CASES = {  # what is said: how to build, units by name, owner's name → parameters' names; "" is the module
    "units beside each other, some whose name begins another's": (
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
    "a unit at several places, and one without parameters": (
        _shared,
        ["silent", "pair", "first"],
        {"silent": [], "pair": ["pair.0.weight"], "first": ["first.weight"], "": []},
    ),
}


def probe_owned(owned_parameters, case: str, as_iterator: bool) -> dict:
    """→ names of the keys, and of each one's parameters; a tied parameter goes by its first name"""
    build, units, _ = CASES[case]
    module = build()
    named = {each: name for name, each in module.named_modules()}
    names = {each: name for name, each in module.named_parameters()}
    given = [module.get_submodule(name) for name in units]
    owned = owned_parameters(module, iter(given) if as_iterator else given)
    keys = [named.get(key, "a key that is no part of the module") for key in owned]
    return {"keys": keys, "owned": [[names[each] for each in its] for its in owned.values()]}


def each_has_one_owner(attempt: Attempt) -> None:
    for case, (_, units, want) in CASES.items():
        result = attempt.run(probe_owned, case, attempt.random.random() < 0.5, context=case)[0]
        keys = [*units, ""]
        if result["keys"] != keys:
            said = f"{case}: keys are {_names(result['keys'])}; expected {_names(keys)}"
            raise Wrong(said, "Look at: every unit is a key, in the given order, and the module is the last.")
        for key, found in zip(result["keys"], result["owned"], strict=True):
            if sorted(found) != sorted(want[key]):
                said = (
                    f"{case}: {_name(key)} has {_names(found) or 'nothing'}; expected {_names(want[key]) or 'nothing'}"
                )
                tied = "tied" in case and "Look at: at which places does a parameter stand, and which units are there?"
                raise Wrong(said, tied or "Look at: which units are around a parameter, and which one is nearest?")


def _name(key: str) -> str:
    return key or "the module"


def _names(names: list[str]) -> str:
    return ", ".join(map(_name, names))


def probe_strangers(owned_parameters) -> list[tuple[str, str]]:
    """→ what it raises for a unit from elsewhere, and for the module itself"""
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


def strangers_are_refused(attempt: Attempt) -> None:
    result = attempt.run(probe_strangers)[0]
    for what, (kind, message) in zip(
        ("that is not inside the module", "that is the module itself"), result, strict=True
    ):
        if kind != "ValueError" or not message.strip():
            raise Wrong(f"a unit {what} raises {kind}; expected a ValueError that says why")
