"""The house keeps its walls: what shared/ holds, who may import whom, and no module that needs itself."""

import ast
import re
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGES = ("shared", "instructor")
OTHERS = ("solutions", "instructor", "tests", "benchmarks")  # none of which shared/ may name
MODULE_OF_ANOTHER = re.compile(rf"(?:{'|'.join(OTHERS)})(?:\.\w+)+")
LESSONS_MAY_IMPORT = [
    "c10d.py",
    "checks",
    "data",
    "deadlines.py",
    "deepspeed_engine.py",
    "dryrun",
    "formulas.py",
    "hosts",
    "jupyter",
    "memory",
    "models.py",
    "planner",
    "plots",
    "progress",
    "ranks",
    "tables",
    "timeline",
    "widgets.py",
    "wire",
]


def _name_of(path: Path) -> str:
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


MODULES = {_name_of(path): path for package in PACKAGES for path in sorted((ROOT / package).rglob("*.py"))}
TREES = {name: ast.parse(path.read_text()) for name, path in MODULES.items()}


def imports_of(name: str) -> Iterator[str]:
    """Yield what a module imports, anywhere in it: modules by their full name, where they are ours."""
    for node in ast.walk(TREES[name]):
        if isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{name}: imports here are absolute"
            for each in node.names:
                inner = f"{node.module}.{each.name}"
                yield inner if inner in MODULES else node.module
        elif isinstance(node, ast.Import):
            yield from (each.name for each in node.names)


def needs(name: str) -> set[str]:
    """Return the modules of ours that run before this one can: what it imports, and the packages that these are in."""
    found = set()
    for each in imports_of(name):
        parts = each.split(".")
        found |= {".".join(parts[:end]) for end in range(1, len(parts) + 1)} & set(MODULES)
    around = name.split(".")
    return found - {".".join(around[:end]) for end in range(1, len(around))}


def room_of(name: str) -> str:
    """Return the name in `ls shared/` or `ls instructor/` that a module belongs to."""
    return ".".join(name.split(".")[:2])


def test_ls_shared_is_the_list_of_what_a_lesson_may_import():
    found = {path.name for path in (ROOT / "shared").iterdir()} - {"__init__.py", "__pycache__"}
    assert sorted(found) == LESSONS_MAY_IMPORT


@pytest.mark.parametrize("name", [name for name in MODULES if name.startswith("shared")])
def test_shared_names_no_module_that_is_not_shared(name):
    assert not [each for each in imports_of(name) if each.split(".")[0] in OTHERS]
    texts = [node.value for node in ast.walk(TREES[name]) if isinstance(node, ast.Constant)]
    assert not [text for text in texts if isinstance(text, str) and MODULE_OF_ANOTHER.fullmatch(text)]


def test_no_module_needs_itself():
    """A circle that a function's own import only puts off counts too."""
    graph = {name: needs(name) - {name} for name in MODULES}
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as circle:
        pytest.fail(" → ".join(circle.args[1]))


def test_dependencies_between_rooms_point_one_way():
    graph: dict[str, set[str]] = {}
    for name in MODULES:
        if name not in PACKAGES:
            rooms = {room_of(each) for each in needs(name) if each not in PACKAGES}
            graph.setdefault(room_of(name), set()).update(rooms - {room_of(name)})
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as circle:
        pytest.fail(" → ".join(circle.args[1]))


def test_no_room_imports_the_checks_but_the_instructor_s():
    users = {room_of(name) for name in MODULES for each in imports_of(name) if each.startswith("shared.checks")}
    assert {user for user in users if not user.startswith("instructor")} == {"shared.checks"}


def test_the_checks_of_one_module_do_not_import_another_s():
    checks = ROOT / "shared" / "checks"
    rooms = {path.name for path in checks.iterdir() if path.is_dir()} - {"__pycache__", "engine", "models"}
    assert rooms == {path.stem for path in (ROOT / "solutions").glob("*.py") if (checks / path.stem).exists()}
    for name in MODULES:
        own = name.split(".")[2] if name.startswith("shared.checks.") else ""
        for each in imports_of(name) if own else ():
            room = each.removeprefix("shared.checks.").split(".")[0] if each.startswith("shared.checks.") else own
            assert room not in rooms - {own}, f"{name} imports {each}"
