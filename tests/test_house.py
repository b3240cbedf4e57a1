"""The course's structure: what shared/ contains, who may import whom, and that no imports are circular."""

import ast
import functools
import re
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGES = ("shared", "instructor")
OTHERS = ("solutions", "instructor", "tests", "benchmarks")  # shared/ may name none of these.
MODULE_OF_OTHERS = re.compile(rf"(?:{'|'.join(OTHERS)})(?:\.\w+)+")
LESSONS_MAY_IMPORT = [
    "c10d.py",
    "checks",
    "data",
    "deadlines.py",
    "deepspeed_engine.py",
    "dryrun",
    "formulas.py",
    "guards",
    "hosts",
    "jupyter",
    "measure",
    "memory",
    "mine.py",
    "models.py",
    "placements.py",
    "planner",
    "plots",
    "predictions.py",
    "progress",
    "ranks",
    "schedules.py",
    "sharded",
    "spmd",
    "tables",
    "timeline",
    "widgets.py",
    "wire",
]


def _name_of(path: Path) -> str:
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


MODULES = {_name_of(path): path for package in PACKAGES for path in sorted((ROOT / package).rglob("*.py"))}


@functools.cache
def tree_of(name: str) -> ast.Module:
    return ast.parse(MODULES[name].read_text())


def imports_of(name: str) -> Iterator[str]:
    """Yield the full name of everything that a module imports, anywhere in it."""
    for node in ast.walk(tree_of(name)):
        if isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{name}: imports must be absolute"
            for alias in node.names:
                inner = f"{node.module}.{alias.name}"
                yield inner if inner in MODULES else node.module
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)


def needs(name: str) -> set[str]:
    """Return our modules that must be loaded before this one: its imports and their packages."""
    found = set()
    for imported in imports_of(name):
        parts = imported.split(".")
        found |= {".".join(parts[:end]) for end in range(1, len(parts) + 1)} & set(MODULES)
    own = name.split(".")
    return found - {".".join(own[:end]) for end in range(1, len(own))}


def package_of(name: str, parts: int = 2) -> str:
    """Return the entry of shared/ or instructor/ that a module belongs to, such as shared.ranks."""
    return ".".join(name.split(".")[:parts])


def test_shared_contains_exactly_what_a_lesson_may_import():
    found = {path.name for path in (ROOT / "shared").iterdir()} - {"__init__.py", "__pycache__"}
    assert sorted(found) == LESSONS_MAY_IMPORT


@pytest.mark.parametrize("name", [name for name in MODULES if name.startswith("shared")])
def test_shared_names_no_module_outside_shared(name):
    assert not [imported for imported in imports_of(name) if imported.split(".")[0] in OTHERS]
    texts = [node.value for node in ast.walk(tree_of(name)) if isinstance(node, ast.Constant)]
    assert not [text for text in texts if isinstance(text, str) and MODULE_OF_OTHERS.fullmatch(text)]


def test_no_imports_are_circular():
    """Imports inside functions count too."""
    graph = {name: needs(name) - {name} for name in MODULES}
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        pytest.fail(" is imported by ".join(error.args[1]))


@pytest.mark.parametrize("parts", [2, 3], ids=["packages", "packages of packages, such as shared.checks.engine"])
def test_dependencies_between_packages_are_not_circular(parts):
    graph: dict[str, set[str]] = {}
    for name in (each for each in MODULES if each.count(".") >= parts - 1):
        package = package_of(name, parts)
        needed = {package_of(other, parts) for other in needs(name) if other.count(".") >= parts - 1}
        graph.setdefault(package, set()).update(needed - {package})
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        pytest.fail(" is imported by ".join(error.args[1]))


def test_only_the_instructor_imports_the_checks():
    users = {package_of(name) for name in MODULES if any(i.startswith("shared.checks") for i in imports_of(name))}
    assert {user for user in users if not user.startswith("instructor")} == {"shared.checks"}


def test_checks_of_one_module_do_not_import_those_of_another():
    checks = ROOT / "shared" / "checks"
    packages = {path.name for path in checks.iterdir() if path.is_dir()} - {"__pycache__", "engine", "models"}
    assert packages == {path.stem for path in (ROOT / "solutions").glob("*.py") if (checks / path.stem).exists()}
    for name in MODULES:
        own = name.split(".")[2] if name.startswith("shared.checks.") else ""
        for imported in imports_of(name) if own else ():
            inside = imported.startswith("shared.checks.")
            package = imported.removeprefix("shared.checks.").split(".")[0] if inside else own
            assert package not in packages - {own}, f"{name} imports {imported}"


def opens_text(node: ast.Call) -> bool:
    """Whether a call reads or writes text, in a file or from another program."""
    name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
    owner = getattr(node.func.value, "id", "") if isinstance(node.func, ast.Attribute) else ""
    given = {keyword.arg: keyword.value for keyword in node.keywords}
    if name in ("run", "Popen", "check_output"):
        return bool(given.keys() & {"text", "universal_newlines"})
    if name in ("open", "fdopen") and owner not in ("zipfile", "archive", "archives", "submissions"):
        if (owner, name) == ("os", "open"):
            return False
        first = node.args[0 if isinstance(node.func, ast.Attribute) and owner != "os" else 1 :]
        mode = given.get("mode") or (first[0] if first else ast.Constant("r"))
        return isinstance(mode, ast.Constant) and "b" not in str(mode.value)
    return name in ("read_text", "write_text") and len(node.args) == (name == "write_text")


@pytest.mark.exhaustive
@pytest.mark.parametrize("package", [*PACKAGES, "benchmarks", "bootstrap.py"])
def test_every_text_has_an_encoding(package):
    """On some systems, the default is not UTF-8. The linter's own rule misses most of these calls."""
    files = [ROOT / package] if package.endswith(".py") else sorted((ROOT / package).rglob("*.py"))
    calls = [(path, node) for path in files for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))]
    found = [(path, node) for path, node in calls if isinstance(node, ast.Call) and opens_text(node)]
    without = [f"{path}:{node.lineno}" for path, node in found if "encoding" not in {k.arg for k in node.keywords}]
    assert found and not without
