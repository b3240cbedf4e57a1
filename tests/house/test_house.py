"""The course's structure: what shared/ contains, who may import whom, how text is read, and how HTML is made."""

import ast
import functools
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import jinja2
import nbformat
import pytest

from instructor import release
from shared.checks import __main__ as checks
from shared.tables import Table, render

ROOT = Path(__file__).parents[2]
PACKAGES = ("shared", "instructor")
OTHERS = ("solutions", "instructor", "tests", "benchmarks")  # shared/ may name none of these.
MODULE_OF_OTHERS = re.compile(rf"(?:{'|'.join(OTHERS)})(?:\.\w+)+")
LESSONS_MAY_IMPORT = [
    *("c10d.py", "checks", "data", "deadlines.py", "deepspeed_engine.py", "dryrun", "formulas.py", "guards"),
    *("hosts", "jupyter", "measure", "memory", "mine.py", "models.py", "placements.py", "planner", "plots"),
    *("predictions.py", "progress", "ranks", "schedules.py", "sharded", "spmd", "tables", "timeline"),
    *("widgets.py", "wire"),
]


def _name_of(path: Path) -> str:
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


MODULES = {_name_of(path): path for package in PACKAGES for path in sorted((ROOT / package).rglob("*.py"))}


@functools.cache
def tree_in(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


def tree_of(name: str) -> ast.Module:
    return tree_in(MODULES[name])


@functools.cache
def imports_of(name: str) -> tuple[str, ...]:
    """Return the full name of everything that a module imports, anywhere in it."""
    return tuple(_imports_in(name))


def _imports_in(name: str) -> Iterator[str]:
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


def test_shared_names_no_module_outside_shared():
    for name in (name for name in MODULES if name.startswith("shared")):
        assert not [imported for imported in imports_of(name) if imported.split(".")[0] in OTHERS], name
        texts = [node.value for node in ast.walk(tree_of(name)) if isinstance(node, ast.Constant)]
        assert not [text for text in texts if isinstance(text, str) and MODULE_OF_OTHERS.fullmatch(text)], name


def assert_no_cycle(graph: dict[str, set[str]]) -> None:
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        pytest.fail(" is imported by ".join(error.args[1]))


def test_no_imports_are_circular():
    """Imports inside functions count too."""
    assert_no_cycle({name: needs(name) - {name} for name in MODULES})


@pytest.mark.parametrize("parts", [2, 3], ids=["packages", "packages of packages, such as shared.checks.engine"])
def test_dependencies_between_packages_are_not_circular(parts):
    graph: dict[str, set[str]] = {}
    for name in (each for each in MODULES if each.count(".") >= parts - 1):
        package = package_of(name, parts)
        needed = {package_of(other, parts) for other in needs(name) if other.count(".") >= parts - 1}
        graph.setdefault(package, set()).update(needed - {package})
    assert_no_cycle(graph)


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
    calls = [(path, node) for path in files for node in ast.walk(tree_in(path))]
    found = [(path, node) for path, node in calls if isinstance(node, ast.Call) and opens_text(node)]
    without = [f"{path}:{node.lineno}" for path, node in found if "encoding" not in {k.arg for k in node.keywords}]
    assert found and not without


# -- a system whose locale is not UTF-8, and a terminal that lacks characters

# Such a system is an older cluster with LC_ALL=en_US, or a container with LC_ALL=C. Python then reads files as ASCII,
# unless each of them is opened with an encoding.
OLD = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0", "PYTHONIOENCODING": "ascii"}
TEXT = ascii("✓ José, प्रिया: 5 ≤ 6")
PRINT = f"from shared.checks.terminal import show_anything as s; s(); print({TEXT}); raise SystemExit({{}})"


def run_in_an_old_locale(*arguments: str) -> subprocess.CompletedProcess:
    environment = os.environ | OLD | {"PYTHONPATH": str(ROOT)}
    command = [sys.executable, *arguments]
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, encoding="ascii")


def test_this_locale_is_not_utf_8():
    assert run_in_an_old_locale("-c", "print(open(__import__('os').devnull).encoding)").stdout.lower() != "utf-8\n"


@pytest.mark.parametrize("status", [0, 1])
def test_what_a_terminal_lacks_is_replaced_and_the_exit_status_stays(status):
    done = run_in_an_old_locale("-c", PRINT.format(status))
    assert (done.returncode, done.stdout) == (status, "? Jos?, ??????: 5 ? 6\n") and not done.stderr


@pytest.mark.parametrize("module", ["instructor.start_page", "instructor.glossary"])
def test_pages_are_the_same_in_every_locale(module):
    done = run_in_an_old_locale("-m", module, "--check")
    assert done.returncode == 0 and "is up to date" in done.stdout, done.stderr


@pytest.mark.slow
def test_a_bundle_is_the_same_in_every_locale(tmp_path):
    done = run_in_an_old_locale("-m", "instructor.release", "00", "--folder", str(tmp_path))
    assert done.returncode == 0, done.stderr
    written = {path.relative_to(tmp_path / "distributed-training-00").as_posix(): path.read_bytes()
               for path in (tmp_path / "distributed-training-00").rglob("*") if path.is_file()}  # fmt: skip
    assert written == release.bundle(0)


def test_a_file_is_checked_in_a_terminal_that_lacks_the_signs():
    done = run_in_an_old_locale("-m", "shared.checks", "scaling", "solutions/scaling.py", "--seed", "1")
    assert done.returncode == 0 and done.stdout.startswith("?"), done.stderr


def test_a_notebook_given_to_the_checks_is_refused_in_one_sentence(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["checks", "manual_ddp", str(ROOT / "labs" / "02_manual_ddp_lab.ipynb")])
    assert checks.main() == 2
    printed = capsys.readouterr().out
    assert printed.count("\n") == 1 and "run its cells" in printed


# -- HTML: templates escape their values, and an undefined name is an error


def test_values_are_escaped():
    shown = Table(["<i>"], [["<script>alert('1')</script>"]], "1 < 2\nand on")._repr_html_()
    assert "<th style='text-align:left;white-space:nowrap'>&lt;i&gt;</th>" in shown
    assert "&lt;script&gt;alert(&#39;1&#39;)&lt;/script&gt;" in shown
    assert shown.endswith("</table><div>1 &lt; 2</div><div>and on</div>")


def test_a_value_that_is_missing_is_an_error():
    with pytest.raises(jinja2.UndefinedError, match="'table' is undefined"):
        render("shared.tables", "table.html")


def test_all_html_is_in_templates():
    """HTML that Python code builds by hand may lack escaping."""
    found = [path for name in ("shared", "instructor") for path in (ROOT / name).rglob("*.py")]
    by_hand = [
        path.name for path in found if any(f"</{tag}>" in path.read_text() for tag in ("td", "div", "span", "b"))
    ]
    assert len(found) > 100 and by_hand == []


def test_no_stored_output_is_empty():
    """The template of tables was once empty, and all tables were blank."""
    for path in [*ROOT.glob("chapters/*.ipynb"), *ROOT.glob("solutions/*.ipynb")]:
        cells = nbformat.read(path, as_version=4).cells
        shown = [output.data for cell in cells for output in cell.get("outputs", []) if "data" in output]
        assert all(data.get("text/html", "-").strip() for data in shown), path.name
