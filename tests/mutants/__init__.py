"""The wrong solutions of each chapter, which checks must reject.

A row of `NN_name.toml` says what a mutant changes in today's solution:

    [[mutant]]
    name = "broadcast_from_rank_0"
    why = "Always broadcasts from rank 0 and ignores `src`."
    caught_by = "broadcast_by_hand · values"
    in = "broadcast_by_hand"                # a function or class, `Class.method`, or nothing for the whole module
    replace = "if dist.get_rank() != src:"  # must be there exactly once
    by = "if dist.get_rank() != 0:"

- Texts of several lines have the indentation of their first line, whatever it is in the solution.
- A row without `replace` gives the function a new body, below its docstring.
- `[[mutant.also]]` makes another change, with its own `replace` and `by`, and `in` if it is elsewhere.
- `in = "clipping.clip_shards_"` changes another module of solutions/, and the mutant uses the changed one.

What a row cannot say, such as a function that calls the solution's, is a function of `NN_name.py`: its docstring says
why and ends with `caught by: …`, and its body is the mutant's code, below the imports of the file that it uses.
"""

import ast
import functools
import re
import textwrap
import tomllib
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from instructor.build import chapters, module_names

MUTANTS = Path(__file__).parent
SOLUTIONS = MUTANTS.parent.parent / "solutions"
CAUGHT_BY = re.compile(r"^caught by: (\S+) · (.+)$", re.MULTILINE)
KEYS = {"name", "why", "caught_by", "in", "replace", "by", "also"}
Definition = ast.FunctionDef | ast.ClassDef


class BadRow(Exception):
    """The error for a row that cannot be applied. It names the row."""


@dataclass(frozen=True)
class Change:
    """Replaces a text in a function, a class or a module of the solution."""

    inside: str
    by: str
    replace: str = ""  # "" replaces the whole body


@dataclass(frozen=True)
class Mutant:
    chapter: str
    name: str
    why: str
    exercise: str  # the piece whose check must catch it; "" if the mutant names none
    check: str
    changes: tuple[Change, ...] = ()
    text: str = ""  # its code, if it makes no changes to the solution's
    solutions: Path = SOLUTIONS

    @property
    def id(self) -> str:
        return f"{self.chapter}-{self.name}"

    def code(self) -> str:
        """Return the wrong solution as the text of a file.

        Raises:
            BadRow: If a change cannot be made, or the result is not Python.
        """
        if not self.changes:
            return self.text
        try:
            return _changed(module_of(self.chapter), self.changes, self.solutions)
        except (BadRow, SyntaxError) as error:
            raise BadRow(f"{self.chapter}.toml, {self.name}: {error}") from None

    def write(self, folder: Path) -> Path:
        """Write the wrong solution into a folder. Returns its path."""
        path = folder / f"{self.name}.py"
        path.write_text(self.code())
        return path


@functools.cache
def module_of(chapter: str) -> str:
    """Return the name of the module that a chapter builds."""
    return next(module_names(each)[0] for each in chapters() if each.name == chapter)


def names(folder: Path = MUTANTS) -> list[str]:
    """Return the chapters that have mutants."""
    return sorted({path.stem for path in folder.glob("[0-9]*.*")})


def of_chapter(chapter: str, folder: Path = MUTANTS) -> list[Mutant]:
    """Return the mutants of a chapter: the rows of its table and the functions of its module.

    Raises:
        BadRow: If a row lacks a key or has an unknown one, or two mutants have the same name.
    """
    table, module = folder / f"{chapter}.toml", folder / f"{chapter}.py"
    found = _rows(chapter, tomllib.loads(table.read_text())) if table.exists() else []
    found += _functions(chapter, module.read_text()) if module.exists() else []
    if twice := [name for name, count in Counter(mutant.name for mutant in found).items() if count > 1]:
        raise BadRow(f"{chapter}: two mutants are called {twice[0]}")
    return found


def named(chapter: str, name: str) -> Mutant:
    """Return one mutant.

    Raises:
        KeyError: If there is none of this name.
    """
    return {mutant.name: mutant for mutant in of_chapter(chapter)}[name]


def _rows(chapter: str, table: dict) -> list[Mutant]:
    found = []
    for row in table["mutant"]:
        if missing := {"name", "why", "caught_by", "by"} - set(row):
            raise BadRow(f"{chapter}.toml, {row.get('name', 'a row')}: no {', '.join(sorted(missing))}")
        if unknown := set(row).union(*row.get("also", ())) - KEYS:
            raise BadRow(f"{chapter}.toml, {row['name']}: unknown keys {', '.join(sorted(unknown))}")
        exercise, _, check = row["caught_by"].partition(" · ")
        first = row.get("in", "")
        changes = [
            Change(each.get("in", first), each["by"], each.get("replace", "")) for each in (row, *row.get("also", ()))
        ]
        found.append(Mutant(chapter, row["name"], row["why"], exercise, check, tuple(changes)))
    return found


def _functions(chapter: str, source: str) -> list[Mutant]:
    lines, nodes = source.splitlines(), ast.parse(source).body
    imports = [node for node in nodes if isinstance(node, ast.Import | ast.ImportFrom)]
    found = []
    for node in nodes:
        if isinstance(node, ast.FunctionDef):
            body = textwrap.dedent("\n".join(lines[node.body[0].end_lineno : node.end_lineno]))
            used = {each.id for each in ast.walk(node) if isinstance(each, ast.Name)}
            text = "\n".join([*_those_used(imports, used), body, ""])
            docstring = ast.get_docstring(node) or ""
            why, caught_by = docstring.split("\n\n")[0], CAUGHT_BY.search(docstring)
            found.append(Mutant(chapter, node.name, why, *(caught_by.groups() if caught_by else ("", "")), text=text))
    return found


def _those_used(imports: list[ast.Import | ast.ImportFrom], used: set[str]) -> list[str]:
    """Return the imports of these names, so that a mutant imports no piece that it lacks."""
    found = []
    for node in imports:
        names = [alias for alias in node.names if (alias.asname or alias.name.split(".")[0]) in used]
        kept = ast.ImportFrom(node.module, names, 0) if isinstance(node, ast.ImportFrom) else ast.Import(names)
        found += [ast.unparse(kept)] if names else []
    return found


def _changed(module: str, changes: tuple[Change, ...], solutions: Path) -> str:
    others = {change.inside.split(".")[0] for change in changes}
    others = {name for name in others if name != module and (solutions / f"{name}.py").exists()}
    text = _merged(module, others, solutions)
    for change in changes:
        first, _, rest = change.inside.partition(".")
        inside = rest if first in {module, *others} else change.inside
        text = _with_change(text, inside, change)
    compile(text, "mutant", "exec", dont_inherit=True)
    return text


def _merged(module: str, others: set[str], solutions: Path) -> str:
    """Return a module's source with the source of other modules in place of its imports of them, direct or indirect."""
    merged: list[str] = []

    def source_of(name: str) -> str:
        merged.append(name)
        text = (solutions / f"{name}.py").read_text()
        lines = text.splitlines()
        for node, imported in reversed(_imports(text)):
            if leads_to_others(imported):
                lines[node.lineno - 1 : node.end_lineno] = [] if imported in merged else [source_of(imported)]
        return "\n".join(lines)

    def leads_to_others(name: str) -> bool:
        text = (solutions / f"{name}.py").read_text()
        return name in others or any(leads_to_others(imported) for _, imported in _imports(text))

    text = source_of(module)
    text = "\n".join([text, *(source_of(name) for name in sorted(others - set(merged)))]) + "\n"
    defined = Counter(node.name for node in ast.parse(text).body if isinstance(node, Definition))
    if twice := [name for name, count in defined.items() if count > 1]:
        raise BadRow(f"{twice[0]} is defined in two of the modules {', '.join(merged)}")
    return text


@functools.cache
def _imports(text: str) -> list[tuple[ast.ImportFrom, str]]:
    nodes = [node for node in ast.parse(text).body if isinstance(node, ast.ImportFrom) and node.module]
    return [(node, node.module.split(".")[1]) for node in nodes if node.module.startswith("solutions.")]


def _with_change(text: str, inside: str, change: Change) -> str:
    lines = text.splitlines()
    first, last, indent = 0, len(lines), ""
    if inside:
        node = _definition(text, inside)
        first, last = min(each.lineno for each in (node, *node.decorator_list)) - 1, node.end_lineno
        if not change.replace:
            has_docstring = ast.get_docstring(node) is not None
            first = node.body[0].end_lineno if has_docstring else node.body[0].lineno - 1
            indent = " " * node.body[0].col_offset
    if change.replace:
        new = _replaced("\n".join(lines[first:last]), change, inside or "the module")
    elif inside:
        new = textwrap.indent(_lines_of(change.by), indent)
    else:
        raise BadRow("a row without `replace` needs `in`")
    return "\n".join([*lines[:first], new, *lines[last:]]) + "\n"


def _definition(text: str, path: str) -> Definition:
    node = ast.parse(text)
    for name in path.split("."):
        inner = [each for each in ast.walk(node) if isinstance(each, Definition) and each.name == name]
        inner = [each for each in inner if each in node.body] or inner
        if len(inner) != 1:
            raise BadRow(f"the solution has {len(inner) or 'no'} {path}")
        node = inner[0]
    return node


def _replaced(text: str, change: Change, place: str) -> str:
    first, *others = _lines_of(change.replace).split("\n")
    pattern = ("^(?P<indent> *)" if others else "") + re.escape(first)
    pattern += "".join(f"\n(?P=indent){re.escape(line)}" if line else "\n" for line in others)
    matches = list(re.finditer(pattern, text, re.MULTILINE))
    if len(matches) != 1:
        raise BadRow(f"this text is {len(matches)} times in {place}, expected once:\n{change.replace}")
    begins, ends = matches[0].span()
    line = text[text.rfind("\n", 0, begins) + 1 :]
    indent = matches[0]["indent"] if others else line[: len(line) - len(line.lstrip(" "))]
    new = _lines_of(change.by).replace("\n", f"\n{indent}")
    return text[:begins] + (indent if others else "") + new + text[ends:]


def _lines_of(text: str) -> str:
    return textwrap.dedent(text).strip("\n")
