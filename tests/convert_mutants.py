"""Turn a chapter's folder of mutants into a table: `python -m tests.convert_mutants 01_collectives [NAME …]`.

Compares each file with today's solution. The smallest change becomes a row, and what a row cannot say becomes a
function of the module, as do the mutants named on the command line. The old folder stays. Compare the results of the
named checks before you delete it: `python -m tests.matrix 01_collectives --named-only --out build/old.json` before the
conversion, and the same with `--compare build/old.json` after another run that follows it.
"""

import argparse
import ast
import builtins
import difflib
import io
import json
import re
import textwrap
import tokenize
from dataclasses import dataclass

from shared.checks.__main__ import exercises_of
from tests import mutants
from tests.mutants import MUTANTS, SOLUTIONS, BadRow, Change, Mutant

Function = ast.FunctionDef


class NoRow(Exception):
    """The error for a mutant that a row cannot say, with the reason."""


@dataclass
class Line:
    code: str  # without its comment
    text: str
    number: int


def lines_of(source: str, node: Function) -> list[Line]:
    """Return the lines of a function's body, without its docstring and without lines that are empty or comments."""
    without = source.splitlines()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            row, column = token.start
            without[row - 1] = without[row - 1][:column].rstrip()
    for each in ast.walk(node):
        if isinstance(each, Function) and each is not node and each.body[0].lineno == each.lineno + 1:
            without[each.lineno - 1] = " " * each.col_offset + f"def {each.name}({parameters(each)}):"
        elif isinstance(each, ast.AnnAssign) and each.value and each.lineno == each.end_lineno:
            left, right = ast.unparse(each.target), ast.get_source_segment(source, each.value)
            without[each.lineno - 1] = " " * each.col_offset + f"{left} = {right}"
    first = node.body[0].end_lineno if ast.get_docstring(node) is not None else node.body[0].lineno - 1
    if ast.get_docstring(node) is None:  # comments above the first statement
        while first > node.lineno and without[first - 1].strip() == "":
            first -= 1
    numbers = range(first, node.end_lineno)
    texts = source.splitlines()
    return [Line(without[number], texts[number], number) for number in numbers if without[number].strip()]


def parameters(node: Function) -> str:
    """Return a function's parameters without their annotations."""
    arguments = ast.parse(ast.unparse(node)).body[0].args
    for each in ast.walk(arguments):
        if isinstance(each, ast.arg):
            each.annotation = None
    return ast.unparse(arguments)


def fits(old: list[Line], by: list[str]) -> bool:
    """Return whether both texts keep their indentation relative to each other when each is dedented."""
    indents = [len(line.text) - len(line.text.lstrip()) for line in old]
    others = [len(line) - len(line.lstrip()) for line in by if line.strip()]
    return not by or (min(indents) == min(others) and (len(old) > 1 or others[0] == indents[0]))


class Conversion:
    def __init__(self, mutant: Mutant):
        self.mutant = mutant
        self.module = mutants.module_of(mutant.chapter)
        text = mutant.text
        aliases = dict(re.findall(r"^from solutions import (\w+) as (\w+)", text, re.MULTILINE))
        if any(name != self.module for name in aliases):
            self.module = next(iter(aliases))
        self.solution = (SOLUTIONS / f"{self.module}.py").read_text()
        self.tree = ast.parse(self.solution)
        self.imports = [node for node in ast.parse(text).body if isinstance(node, ast.Import | ast.ImportFrom)]
        self.wrapped = set()
        for alias in aliases.values():
            self.wrapped |= set(re.findall(rf"\b{alias}\.(\w+)", text))
            text = re.sub(rf"\b{alias}\.", "", text)
        for new, old in re.findall(r"^class (\w+)\((\w+)\):", text, re.MULTILINE):
            if new != old and new not in self.solution and f"class {old}" in self.solution:
                text = re.sub(rf"\b{new}\b", old, text)
        self.text = text
        self.changes: list[Change] = []

    def changes_of_all(self) -> tuple[Change, ...]:
        known = {each.name for each in self.tree.body if isinstance(each, Function | ast.ClassDef)}
        added, changed = [], []
        for node in ast.parse(self.text).body[1:]:
            if isinstance(node, Function | ast.ClassDef) and node.name in known:
                changed.append(node.name)
                self.compare(node, node.name) if isinstance(node, Function) else self.compare_class(node)
            elif not isinstance(node, ast.Import | ast.ImportFrom):
                begin = min(each.lineno for each in (node, *getattr(node, "decorator_list", ())))
                added.append(textwrap.dedent("\n".join(self.text.splitlines()[begin - 1 : node.end_lineno])))
        if not self.changes:
            raise NoRow("changes nothing")
        if added:
            self.add(added, changed)
        self.changes.sort(key=lambda change: change.replace == "")
        return tuple(self.changes)

    def add(self, texts: list[str], changed: list[str]) -> None:
        """Put definitions before the first one that is changed."""
        node = next(each for each in self.tree.body if getattr(each, "name", "") in changed)
        first = min(each.lineno for each in (node, *node.decorator_list))
        lines = self.solution.splitlines()[first - 1 : node.lineno]
        lines[-1] = lines[-1][: lines[-1].index(node.name) + len(node.name) + 1]
        anchor = "\n".join(lines)
        gap = "\n\n\n" if any("\n" in text for text in texts) else "\n"
        inside = "" if self.module == mutants.module_of(self.mutant.chapter) else self.module
        self.changes.append(Change(inside, gap.join(texts) + f"\n\n\n{anchor}", anchor))

    def original(self, path: str) -> ast.AST:
        try:
            return mutants._definition(self.solution, path)
        except BadRow as error:
            raise NoRow(f"adds {path}") from error

    def path_of(self, name: str, owner: ast.ClassDef | None) -> str:
        """Return where the solution defines a function or a method, which may be in a base class."""
        while owner is not None:
            if any(isinstance(each, Function) and each.name == name for each in owner.body):
                return f"{owner.name}.{name}"
            bases = [base.id for base in owner.bases if isinstance(base, ast.Name)]
            owner = next((each for each in self.tree.body if getattr(each, "name", "") in bases), None)
        return name

    def compare_class(self, node: ast.ClassDef) -> None:
        original = self.original(node.name)
        extends = any(isinstance(base, ast.Name) and base.id == node.name for base in node.bases)
        for each in node.body:
            if isinstance(each, Function):
                path = self.path_of(each.name, original)
                if "." not in path:
                    raise NoRow(f"adds {node.name}.{path}")
                self.compare(each, path)
            elif not isinstance(each, ast.Expr | ast.Pass) and (
                extends or ast.dump(each) not in map(ast.dump, original.body)
            ):
                raise NoRow("changes a class attribute")
        names = {each.name for each in node.body if isinstance(each, Function)}
        if not extends and (lost := [e.name for e in original.body if isinstance(e, Function) and e.name not in names]):
            raise NoRow(f"lacks {', '.join(lost)}")

    def compare(self, node: Function, path: str) -> None:
        original = self.original(path)
        if parameters(node) != parameters(original):
            raise NoRow(f"other parameters of {path}: {parameters(node)} for {parameters(original)}")
        old = lines_of(self.solution, original)
        self.rename(node, original, old)
        new = [line.code for line in lines_of(self.text, node)]
        by_indent = " " * (original.col_offset - node.col_offset) if original.col_offset > node.col_offset else ""
        new = [by_indent + line for line in new]
        new = self.with_original(node, original, old, new)
        hunks = self.hunks(original, old, new)
        inside = path if self.module == mutants.module_of(self.mutant.chapter) else f"{self.module}.{path}"
        body = textwrap.dedent("\n".join(new))
        size = sum(len(each[0].splitlines()) + len(each[1].splitlines()) + 1 for each in hunks) - 1
        if hunks and size <= len(new) + 1:
            self.changes += [Change(inside, by, replace) for replace, by in hunks]
        elif hunks:
            self.changes.append(Change(inside, body))
        elif len(node.decorator_list) < len(original.decorator_list):
            decorator = f"@{ast.unparse(original.decorator_list[0])}\ndef {original.name}("
            self.changes.append(Change(inside, f"def {original.name}(", decorator))

    def rename(self, node: Function, original: Function, old: list[Line]) -> None:
        """Give a mutant's variables the names that make it most like today's solution."""

        lines, wanted = [line.code for line in lines_of(self.text, node)], {line.code.strip() for line in old}
        reads = {name: rf"(?<![\w.\"]){name}\b(?!\")" for name in self.stored(node)}

        def alike(mine: str, theirs: str) -> int:
            return sum(re.sub(reads[mine], theirs, line).strip() in wanted for line in lines)

        mine, theirs = self.stored(node) - self.stored(original), self.stored(original) - self.stored(node)
        while pairs := [(a, b) for a in sorted(mine) for b in sorted(theirs)]:
            a, b = max(pairs, key=lambda pair: alike(*pair))
            if alike(a, b) <= sum(line.strip() in wanted for line in lines):
                return
            mine, theirs = mine - {a}, theirs - {b}
            lines = [re.sub(reads[a], b, line) for line in lines]
            source = self.text.splitlines()
            for index in range(node.lineno - 1, node.end_lineno):
                source[index] = re.sub(reads[a], b, source[index])
            self.text = "\n".join(source) + "\n"

    def stored(self, function: Function) -> set[str]:
        names = [each for each in ast.walk(function) if isinstance(each, ast.Name)]
        return {each.id for each in names if isinstance(each.ctx, ast.Store)}

    def with_original(self, node: Function, original: Function, old: list[Line], new: list[str]) -> list[str]:
        """Put the original's body in place of a call of it, if the call is the first or the last statement."""
        calls = [each for each in ast.walk(node) if isinstance(each, ast.Call) and self.calls_original(each, node)]
        if not calls:
            return new
        body = node.body[1:] if ast.get_docstring(node) is not None else node.body
        last, first = body[-1], body[0]
        if len(calls) > 1:
            raise NoRow("calls the original twice")
        lines = [line.code for line in old]
        indent = " " * (len(new[0]) - len(new[0].lstrip()))
        source = self.text.splitlines()
        offset = original.col_offset - node.col_offset
        before = [" " * offset + line for line in source[body[0].lineno - 1 : last.lineno - 1] if line.strip()]
        if getattr(last, "value", None) is calls[0] and isinstance(last, ast.Return | ast.Expr):
            return before + self.assignments(calls[0], node, indent) + lines
        returns = any(isinstance(each, ast.Return) for each in ast.walk(original))
        if isinstance(first, ast.Expr) and first.value is calls[0] and not returns:
            rest = source[first.end_lineno : node.end_lineno]
            return self.assignments(calls[0], node, indent) + lines + [" " * offset + line for line in rest]
        return self.around_original(node, body, calls[0], original, lines, indent, offset)

    def around_original(self, node, body, call, original, lines, indent, offset) -> list[str]:
        """Put the original's body before the statement that calls it, and what it returns in place of the call."""
        returns = [each for each in ast.walk(original) if isinstance(each, ast.Return)]
        own = [each for each in original.body if isinstance(each, ast.Return)]
        statement = next((each for each in body if call in ast.walk(each)), None)
        nested = statement is None or isinstance(
            statement, ast.If | ast.For | ast.While | ast.With | ast.Try | Function
        )
        if len(returns) > len(own) or nested or statement.lineno != statement.end_lineno:
            raise NoRow("wraps the original")
        source = [" " * offset + line for line in self.text.splitlines()]
        before = [line for line in source[body[0].lineno - 1 : statement.lineno - 1] if line.strip()]
        after = [line for line in source[statement.end_lineno : node.end_lineno] if line.strip()]
        start = before + self.assignments(call, node, indent)
        if not own:
            if isinstance(statement, ast.Expr) and statement.value is call:
                return [*start, *lines, *after]
            raise NoRow("wraps the original, which returns nothing")
        value = ast.get_source_segment(self.solution, own[0].value)
        if own[0].lineno != own[0].end_lineno:
            raise NoRow("wraps the original")
        simple = isinstance(own[0].value, ast.Name | ast.Call | ast.Attribute | ast.Subscript)
        text = source[statement.lineno - 1]
        if isinstance(statement, ast.Return | ast.Assign) and statement.value is call:
            simple = True
        called = ast.get_source_segment(self.text, call)
        return [*start, *lines[:-1], text.replace(called, value if simple else f"({value})"), *after]

    def calls_original(self, call: ast.Call, node: Function) -> bool:
        if isinstance(call.func, ast.Attribute) and isinstance(call.func.value, ast.Call):
            return ast.unparse(call.func.value) == "super()"
        return isinstance(call.func, ast.Name) and call.func.id == node.name and node.name in self.wrapped

    def assignments(self, call: ast.Call, node: Function, indent: str) -> list[str]:
        if isinstance(call.func, ast.Attribute) and call.func.attr != node.name:
            raise NoRow("calls another method of super()")
        arguments = [each.arg for each in (*node.args.posonlyargs, *node.args.args)]
        arguments = arguments[1:] if isinstance(call.func, ast.Attribute) else arguments
        given = dict(zip(arguments, map(ast.unparse, call.args), strict=False))
        given |= {each.arg: ast.unparse(each.value) for each in call.keywords if each.arg}
        if node.args.vararg:
            raise NoRow("takes any number of arguments")
        changed = {name: value for name, value in given.items() if value != name}
        if len(changed) > 1 or set(given) != set(arguments) | {each.arg for each in node.args.kwonlyargs}:
            raise NoRow("calls the original with other arguments")
        return [f"{indent}{name} = {value}" for name, value in changed.items()]

    def hunks(self, original: Function, old: list[Line], new: list[str]) -> list[tuple[str, str]]:
        """Return pairs of texts: what is in the original, exactly once, and what replaces it."""
        scope = "\n".join(self.solution.splitlines()[original.lineno - 1 : original.end_lineno])
        matcher = difflib.SequenceMatcher(None, [line.code for line in old], new, autojunk=False)
        spans = []
        for operation, *span in matcher.get_opcodes():
            if operation != "equal" and spans and span[0] - spans[-1][1] <= 1:
                spans[-1] = [spans[-1][0], span[1], spans[-1][2], span[3]]  # only one line is between them
            elif operation != "equal":
                spans.append(span)
        found = []
        for begin, end, new_begin, new_end in spans:
            by, after = new[new_begin:new_end], 0
            while begin == end or not self.is_unique(old[begin:end], scope) or not fits(old[begin:end], by):
                if after == 0 and end < len(old):
                    by, end, after = [*by, old[end].text], end + 1, 1
                elif begin > 0:
                    by, begin = [old[begin - 1].text, *by], begin - 1
                elif end < len(old):
                    by, end = [*by, old[end].text], end + 1
                else:
                    break
            found.append((self.text_of(old[begin:end]), textwrap.dedent("\n".join(by))))
        return found

    def text_of(self, lines: list[Line]) -> str:
        if len(lines) == 1:
            line = lines[0]
            return (line.code if line.code in line.text else line.text).strip()
        return textwrap.dedent("\n".join(self.solution.splitlines()[lines[0].number : lines[-1].number + 1]))

    def is_unique(self, lines: list[Line], scope: str) -> bool:
        try:
            mutants._replaced(scope, Change("", "", self.text_of(lines)), "")
        except BadRow:
            return False
        return True


def row_of(mutant: Mutant) -> Mutant:
    """Return a mutant as changes of the solution.

    Raises:
        NoRow: If that is not possible.
    """
    conversion = Conversion(mutant)
    changes = conversion.changes_of_all()
    row = Mutant(mutant.chapter, mutant.name, mutant.why, mutant.exercise, mutant.check, changes)
    try:
        unknown = undefined(row.code())
        if unknown:
            row = with_imports(row, unknown, conversion.imports)
            unknown = undefined(row.code())
    except BadRow as error:
        raise NoRow(str(error)) from error
    if unknown:
        raise NoRow(f"uses {', '.join(sorted(unknown))}")
    return row


def with_imports(row: Mutant, unknown: set[str], imports: list) -> Mutant:
    lines = []
    for node in imports:
        names = [alias for alias in node.names if (alias.asname or alias.name.split(".")[0]) in unknown]
        if names and isinstance(node, ast.ImportFrom):
            lines.append(ast.unparse(ast.ImportFrom(node.module, names, 0)))
        elif names:
            lines.append(ast.unparse(ast.Import(names)))
    first, *others = row.changes
    first = Change(first.inside, "\n".join([*lines, "", first.by]), first.replace)
    return Mutant(row.chapter, row.name, row.why, row.exercise, row.check, (first, *others))


def undefined(code: str) -> set[str]:
    """Return the names that code uses and nothing in it defines."""
    nodes = list(ast.walk(ast.parse(code)))
    used = {node.id for node in nodes if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load)}
    defined = {node.id for node in nodes if isinstance(node, ast.Name) and not isinstance(node.ctx, ast.Load)}
    defined |= {node.arg for node in nodes if isinstance(node, ast.arg)}
    defined |= {node.name for node in nodes if isinstance(node, Function | ast.ClassDef | ast.ExceptHandler)}
    for node in nodes:
        if isinstance(node, ast.Import | ast.ImportFrom):
            defined |= {alias.asname or alias.name.split(".")[0] for alias in node.names}
    return used - defined - set(dir(builtins)) - {"__file__", "__name__"}


def as_toml(mutant: Mutant) -> str:
    lines = ["[[mutant]]", f"name = {quoted(mutant.name)}", f"why = {quoted(mutant.why)}"]
    lines.append(f"caught_by = {quoted(f'{mutant.exercise} · {mutant.check}')}")
    inside = mutant.changes[0].inside
    for index, change in enumerate(mutant.changes):
        lines += ["[[mutant.also]]"] if index else []
        lines += [f"in = {quoted(change.inside)}"] if change.inside != inside or not index else []
        lines += [f"replace = {quoted(change.replace)}"] if change.replace else []
        lines.append(f"by = {quoted(change.by)}")
    return "\n".join(lines) + "\n"


def quoted(text: str) -> str:
    if "\n" in text:
        return f"'''\n{text}\n'''" if "'''" not in text else json.dumps(text, ensure_ascii=False)
    return f"'{text}'" if '"' in text and "'" not in text else json.dumps(text, ensure_ascii=False)


def as_function(mutant: Mutant) -> tuple[set[str], str]:
    """Return the imports that a mutant needs, and it as a function of the chapter's module."""
    lines, nodes = mutant.text.splitlines(), ast.parse(mutant.text).body
    own = [node for node in nodes if not isinstance(node, ast.Import | ast.ImportFrom)][1:]
    last_import = max((node.end_lineno for node in nodes if isinstance(node, ast.Import | ast.ImportFrom)), default=0)
    begin = max(last_import, nodes[0].end_lineno)
    body = re.sub(r"\n\n\n+", "\n\n", "\n".join(lines[begin:]).strip())
    used = {node.id for each in own for node in ast.walk(each) if isinstance(node, ast.Name)}
    imports = set()
    for node in nodes:
        if isinstance(node, ast.Import | ast.ImportFrom):
            names = [alias for alias in node.names if (alias.asname or alias.name.split(".")[0]) in used]
            for name in names:
                one = ast.ImportFrom(node.module, [name], 0) if isinstance(node, ast.ImportFrom) else ast.Import([name])
                imports.add(ast.unparse(one))
    docstring = ast.get_docstring(ast.parse(mutant.text))
    text = f'"""{docstring}\n"""\n\n{body}'
    return imports, f"def {mutant.name}():\n{textwrap.indent(text, '    ')}\n"


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.convert_mutants", description=__doc__.splitlines()[0])
    parser.add_argument("chapter")
    parser.add_argument("name", nargs="*", help="mutants that become functions")
    options = parser.parse_args()
    folder = MUTANTS / options.chapter
    for old in MUTANTS.glob(f"{options.chapter}.*"):
        old.unlink()
    pieces = [exercise.piece for exercise in exercises_of(mutants.module_of(options.chapter))]
    found = sorted(mutants.of_chapter(options.chapter), key=lambda mutant: pieces.index(mutant.exercise))
    rows, functions, imports = [], [], set()
    for mutant in found:
        try:
            if mutant.name in options.name:
                raise NoRow("named")
            row = as_toml(row_of(mutant))
            if row.count("\n") > as_function(mutant)[1].count("\n") + 4:
                raise NoRow("shorter as a function")
            rows.append(row)
        except NoRow as reason:
            print(f"{mutant.name}: {reason}")
            needed, text = as_function(mutant)
            imports |= needed
            functions.append(text)
    (MUTANTS / f"{options.chapter}.toml").write_text("\n".join(rows))
    head = '"""Mutants of this chapter that a row of its table cannot say. Each function is one: see tests/mutants."""'
    if functions:
        module = "\n\n\n".join(["\n".join([head, "", *sorted(imports)]), *functions])
        (MUTANTS / f"{options.chapter}.py").write_text(module)
    print(f"{len(rows)} rows, {len(functions)} functions; {folder} can be deleted")


if __name__ == "__main__":
    main()
