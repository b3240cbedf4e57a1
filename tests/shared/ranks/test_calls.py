"""What is defined in a notebook can be called on a rank: there, functions use the rank's variables."""

import functools
from dataclasses import dataclass
from types import SimpleNamespace

import IPython
import pytest

from shared.ranks import calls

NOTEBOOK = """
from dataclasses import dataclass

scale = 2

def scaled(value: int, *more, plus=0) -> int:
    "Return the value times the scale."
    return scale * value + sum(more) + plus

def counter(n):
    def count(n):
        return n if n == 0 else 1 + count(n - 1)
    return count

class Base:
    def name(self):
        return "base"

class Derived(Base):
    kind = "derived"

    def name(self):
        return f"{self.kind} of {super().name()} with {scale}"

@dataclass
class Settings:
    rate: float
    rule: object = lambda x: scale * x
"""


@pytest.fixture
def notebook(monkeypatch) -> dict:
    """What a notebook defines. The shell that unpacks it has another scale."""
    rank = {"__name__": "__main__", "scale": 100}
    monkeypatch.setattr(IPython, "get_ipython", lambda: SimpleNamespace(user_ns=rank))
    defined: dict = {"__name__": "__main__"}
    exec(NOTEBOOK, defined)
    return defined


def sent(fn, *args):
    """Return the result of a call that has been packed and unpacked."""
    fn, args = calls.unpack(calls.pack(fn, args))
    return fn(*args)


def test_a_function_of_the_notebook_uses_the_variables_of_the_rank(notebook):
    assert notebook["scaled"](3) == 6
    assert sent(notebook["scaled"], 3, 1) == 301
    sent_function, _ = calls.unpack(calls.pack(notebook["scaled"], ()))
    assert sent_function.__annotations__ == notebook["scaled"].__annotations__ != {}
    assert sent_function(3, plus=7) == 307
    assert sent_function.__doc__ == notebook["scaled"].__doc__ and sent_function.__name__ == "scaled"


def test_a_function_may_enclose_itself(notebook):
    assert sent(notebook["counter"](0), 5) == 5


def test_functions_inside_arguments_are_sent_too(notebook):
    def apply(functions, value):
        return [function(value) for function in functions]

    partial = functools.partial(notebook["scaled"], plus=1)
    assert sent(apply, [notebook["scaled"], lambda x: x + 1, partial], 3) == [300, 4, 301]


def test_a_class_of_the_notebook_and_its_objects_arrive(notebook):
    made = sent(lambda kind: kind(), notebook["Derived"])
    assert made.name() == "derived of base with 100"
    assert sent(lambda one: one.name(), notebook["Derived"]()) == "derived of base with 100"
    assert sent(lambda settings: (settings.rate, settings.rule(2)), notebook["Settings"](0.1)) == (0.1, 200)


def wrapping(function):
    @functools.wraps(function)
    def wrapper(*args):
        return function(*args), LOCAL

    return wrapper


LOCAL = "of this module"


@wrapping
def wrapped(value):
    return value


@dataclass
class Importable:
    value: int


def test_what_can_be_imported_is_sent_by_its_name():
    assert len(calls.pack(wrapped, ())) < 200
    assert sent(wrapped, 1) == (1, LOCAL)
    assert sent(lambda: Importable) is Importable
    assert sent(wrapping(lambda: 1)) == (1, LOCAL)
