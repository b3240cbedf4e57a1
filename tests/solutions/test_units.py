"""Test which unit owns which parameter, and what a resharded parameter may be used for."""

import pytest
import torch
from torch import nn

from shared.sharded.parameters import allow_reads, forbid_reads
from solutions.units import owned_parameters

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


@pytest.mark.parametrize("case", CASES)
def test_each_parameter_belongs_to_the_innermost_unit_around_it(case):
    build, units, expected = CASES[case]
    module = build()
    names = {parameter: name for name, parameter in module.named_parameters()}
    owned = owned_parameters(module, iter([module.get_submodule(name) for name in units]))
    assert list(owned) == [*(module.get_submodule(name) for name in units), module]
    found = [sorted(names[parameter] for parameter in parameters) for parameters in owned.values()]
    assert found == [sorted(expected[name]) for name in (*units, "")]


@pytest.mark.parametrize("pick", [lambda module: _linear(), lambda module: module])
def test_a_unit_must_be_inside_the_module(pick):
    module = _nested()
    with pytest.raises(ValueError, match="submodules"):
        owned_parameters(module, [module.outer, pick(module)])


@pytest.mark.parametrize("name", ["view_as", "reshape_as", "expand_as"])
def test_a_resharded_parameter_gives_others_its_shape_but_no_values(name):
    parameter, other = nn.Parameter(torch.ones(2, WIDTH)), torch.arange(2.0 * WIDTH).view(2, WIDTH)
    forbid_reads([parameter])
    assert torch.equal(getattr(other, name)(parameter), other)
    with pytest.raises(RuntimeError, match="has memory only while"):
        getattr(parameter, name)(other)
    with pytest.raises(RuntimeError, match="has memory only while"):
        other.add(parameter)
    allow_reads([parameter])
    assert torch.equal(getattr(parameter, name)(other), torch.ones(2, WIDTH))
