"""The check that a mutant names rejects it, and our own solutions and every variant pass all checks.

`make test` tries our solutions and one mutant of each exercise. `make test ALL=1` tries all mutants and all variants,
and runs the notebooks of our solutions.
"""

import ast
import contextlib
import pickle
from collections import Counter
from dataclasses import replace
from pathlib import Path
from unittest import mock

import pytest

from instructor.build import chapters, module_names
from instructor.grade import safe_loading
from shared import ranks
from shared.checks.__main__ import exercises_of, run_file
from shared.checks.engine import parcel
from tests import mutants

pytestmark = pytest.mark.slow

TESTS = Path(__file__).parents[2]
MODULES = {chapter: module_names(chapter)[0] for chapter in chapters()}
DEFINE = {"exercise", "export", "given"}  # the tags of such cells
WAITS = "at once"  # a check whose mutants hang until a deadline, so another one stands for their exercise
MIN_MUTANTS, MIN_VARIANTS = 8, 3  # mutants of a chapter, and variants of an exercise, unless the chapter is a draft


def all_variants() -> list:
    return [
        pytest.param(module, path, id=f"{chapter.name}-{path.stem}", marks=pytest.mark.exhaustive)
        for chapter, module in MODULES.items()
        for path in sorted((TESTS / "variants" / chapter.name).glob("*.py"))
    ]


def all_mutants() -> list:
    found, tried = [], set()
    for chapter, module in MODULES.items():
        for mutant in mutants.of_chapter(chapter.name):
            exercise = chapter.name, mutant.exercise
            stands_for_all = exercise not in tried and mutant.check != WAITS
            marks = [] if stands_for_all else [pytest.mark.exhaustive]
            tried |= {exercise} if stands_for_all else set()
            found.append(pytest.param(module, mutant, id=mutant.id, marks=marks))
    return found


@pytest.fixture(scope="module", autouse=True)
def four_fresh_ranks():
    ranks.start(world_size=4, detect_mismatch=False)
    yield
    ranks.stop()


@pytest.fixture
def judged_as_graded(monkeypatch):
    """Install the grader's guard, which must not find tampering in honest work."""
    monkeypatch.setattr(pickle, "loads", pickle.loads)
    monkeypatch.setattr(parcel, "unpack", parcel.unpack)
    return safe_loading.install()


@contextlib.contextmanager
def on_two_and_three_ranks(module: str):
    """Run a module's checks only there, if they run there at all: more and fewer ranks reject no other styles."""
    with contextlib.ExitStack() as changes:
        for exercise in exercises_of(module):
            sizes = [
                tuple(size for size in check.world_sizes if size in (2, 3)) or check.world_sizes
                for check in exercise.checks
            ]
            pairs = zip(exercise.checks, sizes, strict=True)
            checks = [replace(check, world_sizes=chosen) for check, chosen in pairs]
            changes.enter_context(mock.patch.object(exercise, "checks", checks))
        yield


# These tests take the longest, so they come first.
@pytest.mark.parametrize(("module", "path"), all_variants())
def test_a_right_solution_written_differently_passes(module, path, judged_as_graded):
    with on_two_and_three_ranks(module):
        failed = [verdict for verdict in run_file(module, path) if not verdict.passed]
    assert not failed, "\n".join(f"{v.exercise} · {v.check}: {v.evidence}" for v in failed)
    assert judged_as_graded == [], "the guard rejected a pickle"


def write_solution(chapter, folder: Path) -> Path:
    """Write the cells of a lab's source that define something on the ranks into one file."""
    cells = [cell for cell in chapter.read("lab").cells if DEFINE & {*cell.metadata.get("tags", ())}]
    path = folder / f"{chapter.name}.py"
    path.write_text("\n\n".join(cell.source.removeprefix("%%ranks") for cell in cells))
    return path


@pytest.mark.parametrize("chapter", chapters(), ids=lambda chapter: chapter.name)
def test_our_own_solution_passes(chapter, tmp_path):
    with on_two_and_three_ranks(MODULES[chapter]):
        verdicts = run_file(MODULES[chapter], write_solution(chapter, tmp_path))
    failed = [verdict for verdict in verdicts if not verdict.passed]
    assert not failed, "\n".join(f"{v.exercise} · {v.check}: {v.evidence}" for v in failed)


@pytest.mark.parametrize(("module", "mutant"), all_mutants())
def test_the_named_check_catches_the_mutant(module, mutant, record_property, tmp_path):
    exercise, check = mutant.exercise, mutant.check
    assert check, f"{mutant.id} does not say which check must catch it"
    record_property("caught_by", f"{exercise} · {check}")
    known = [(each.piece, its.name) for each in exercises_of(module) for its in each.checks]
    assert (exercise, check) in known, f"there is no check {exercise} · {check}; the checks are {known}"
    (caught,) = run_file(module, mutant.write(tmp_path), only=exercise, check=check)
    assert not caught.passed, f"{mutant.id} passes {exercise} · {check}"
    assert caught.evidence, "a failed check must give evidence"
    assert "cannot be compared" not in caught.evidence, "the check itself failed, so it has not judged the mutant"


@pytest.mark.parametrize("chapter", chapters(), ids=lambda chapter: chapter.name)
def test_there_are_enough_mutants_and_variants(chapter):
    assert len(mutants.of_chapter(chapter.name)) >= (1 if chapter.is_draft else MIN_MUTANTS)
    variants = [ast.parse(path.read_text()).body for path in (TESTS / "variants" / chapter.name).glob("*.py")]
    defined = Counter(getattr(statement, "name", None) for body in variants for statement in body)
    assert {
        exercise.piece: defined[exercise.piece]
        for exercise in exercises_of(MODULES[chapter])
        if defined[exercise.piece] < (1 if chapter.is_draft else MIN_VARIANTS)
    } == {}, "these exercises have too few variants"
