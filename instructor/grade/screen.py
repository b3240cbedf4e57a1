"""Look through a student's code before it runs: what does not compile, what grading forbids, what a person should see.

This reads code and runs none of it. It catches who copies openly; whoever hides it is caught by what runs, or not.
"""

import ast
import builtins
import contextlib
import re

_MAGIC_LINE = re.compile(r"^([ \t]*)[%!].*$", re.MULTILINE)
FORBIDDEN = ("shared.checks", "instructor")
UNUSUAL = ("ctypes", "gc", "importlib", "inspect", "mmap", "multiprocessing", "os", "pickle", "signal", "socket")
UNUSUAL += ("subprocess", "sys", "tempfile", "threading")
MEASURING = (
    "shared.wire.mismatch",
    "shared.ranks.doctor",
    "shared.ranks.rankside",
    "shared.wire.instrumentation",
)  # what they note can be rewritten
READY_MADE = (
    "DistributedDataParallel",
    "FullyShardedDataParallel",
    "ZeroRedundancyOptimizer",
    "fully_shard",
    "DTensor",
)
REACHING = ("__import__", "globals", "open", "setattr", "vars")  # as functions: methods may be named so
UNUSUAL_NAMES = ("__builtins__", "__reduce__", "__subclasses__", "_getframe", "_exit", "eval", "exec", "kill", "fork")


def problem(source: str) -> str:
    """→ why a cell cannot be loaded; "" if it compiles"""
    try:
        source.encode()
        compile(source, "cell", "exec")
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        line = f", line {error.lineno}" if isinstance(error, SyntaxError) and error.lineno else ""
        said = error.msg if isinstance(error, SyntaxError) else str(error)
        return f"the cell does not compile: {type(error).__name__}{line}: {said}"
    return ""


def without_magics(source: str) -> str:
    """→ the cell without lines such as `%time f()` and `!ls`, which a notebook runs and which define nothing"""
    rest = _MAGIC_LINE.sub(r"\1pass", source)
    return rest if problem(source) and not problem(rest) else source


def borrowed(cells: list[dict], others: list[str]) -> list[str]:
    """→ what the exercises use that is defined in other cells of the student's notebook alone: it is not there"""
    own, used, lent = set(dir(builtins)), set(), set()
    for cell in cells:
        stored, loaded = _stored_and_loaded(cell["source"])
        own |= stored
        used |= loaded if cell["grade_id"] else set()
    for source in others:
        with contextlib.suppress(SyntaxError, ValueError, RecursionError, MemoryError):
            lent |= _stored_and_loaded(source)[0]
    return sorted((used - own) & lent)


def _stored_and_loaded(source: str) -> tuple[set[str], set[str]]:
    stored, loaded = set(), set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Name):
            (loaded if isinstance(node.ctx, ast.Load) else stored).add(node.id)
        elif isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            stored.add(node.name)
        elif isinstance(node, (ast.Import, ast.ImportFrom)):
            stored |= {each.asname or each.name.split(".")[0] for each in node.names}
        elif isinstance(node, ast.arg):
            stored.add(node.arg)
    return stored, loaded


def refusals(source: str, own_modules: tuple[str, ...]) -> list[str]:
    """→ what may not be used where it is asked for: the checks themselves, and solutions still to be written

    own_modules: the modules of solutions/ that students have not been given.
    """
    forbidden = (*FORBIDDEN, *own_modules)
    found = []
    for name, line in _names_of_modules(source):
        found += [f"line {line} uses {each}" for each in forbidden if name == each or name.startswith(f"{each}.")]
    return list(dict.fromkeys(found))


def notices(source: str, given: str = "") -> list[str]:
    """→ what an instructor should look at; no points are taken for it

    given: the lab's own code. What it names is asked for.
    """
    found = [
        (line, f"uses {name}")
        for name, line in _names_of_modules(source)
        if name.split(".")[0] in UNUSUAL or name in MEASURING or name.split(".")[-1] in READY_MADE
    ]
    tree = ast.parse(source)
    modules = {each.asname or each.name.split(".")[0] for node in ast.walk(tree) for each in _imported(node)} | {"dist"}
    for node in ast.walk(tree):
        name = node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""
        if name in (*UNUSUAL_NAMES, *READY_MADE) or (isinstance(node, ast.Name) and name in REACHING):
            found.append((node.lineno, f"uses {name}"))
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and _root(node) in modules | {"torch"}:
            found.append((node.lineno, f"sets {ast.unparse(node)}"))
    asked_for = {f"uses {name}" for name in re.findall(r"\w+", given)}
    return [f"line {line} {said}" for line, said in dict.fromkeys(sorted(found)) if said not in asked_for]


def _imported(node: ast.AST) -> list[ast.alias]:
    return node.names if isinstance(node, ast.Import) else []


def _root(node: ast.Attribute) -> str:
    value: ast.AST = node
    while isinstance(value, ast.Attribute):
        value = value.value
    return value.id if isinstance(value, ast.Name) else ""


def _names_of_modules(source: str) -> list[tuple[str, int]]:
    """→ (module, line): what is imported, by a statement or by a name in a string"""
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found += [(each.name, node.lineno) for each in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            found += [(node.module, node.lineno)]
            found += [(f"{node.module}.{each.name}", node.lineno) for each in node.names]
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            ours = node.value.startswith(("shared.", "solutions.", "instructor."))
            found += [(node.value, node.lineno)] if ours else []
    return found
