"""Read a student's code before it runs: find what does not compile, what is forbidden, and what to show the instructor.

Nothing is executed here. This catches obvious copying. Hidden copying is caught only if it fails at run time.
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
)  # Code that imports these could rewrite what they have recorded.
READY_MADE = (
    "DistributedDataParallel",
    "FullyShardedDataParallel",
    "ZeroRedundancyOptimizer",
    "fully_shard",
    "DTensor",
)
REACHING = ("__import__", "globals", "open", "setattr", "vars")  # as functions; methods may have these names
UNUSUAL_NAMES = ("__builtins__", "__reduce__", "__subclasses__", "_getframe", "_exit", "eval", "exec", "kill", "fork")


def problem(source: str) -> str:
    """Return why a cell cannot be loaded, or "" if it compiles."""
    try:
        source.encode()
        compile(source, "cell", "exec")
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        line = f", line {error.lineno}" if isinstance(error, SyntaxError) and error.lineno else ""
        message = error.msg if isinstance(error, SyntaxError) else str(error)
        return f"the cell does not compile: {type(error).__name__}{line}: {message}"
    return ""


def without_magics(source: str) -> str:
    """Return the cell without lines such as `%time f()` and `!ls`, which only a notebook can run."""
    rest = _MAGIC_LINE.sub(r"\1pass", source)
    return rest if problem(source) and not problem(rest) else source


def borrowed(cells: list[dict], others: list[str]) -> list[str]:
    """Return the names that exercises use but that only other cells define. They are missing in grading."""
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
            stored |= {alias.asname or alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.arg):
            stored.add(node.arg)
    return stored, loaded


def forbidden(source: str, withheld: tuple[str, ...]) -> list[str]:
    """Return where an exercise uses the checks, the grader, or solutions that students do not have yet.

    Args:
        withheld: The modules of solutions/ that students have not been given.
    """
    found = []
    for name, line in _module_names(source):
        modules = [module for module in (*FORBIDDEN, *withheld) if f"{name}.".startswith(f"{module}.")]
        found += [f"line {line} uses {module}" for module in modules]
    return list(dict.fromkeys(found))


def notices(source: str, given: str = "") -> list[str]:
    """Return what an instructor should look at. These notices cost no points.

    Args:
        given: The lab's own code. Names that it uses are not reported.
    """
    found = [
        (line, f"uses {name}")
        for name, line in _module_names(source)
        if name.split(".")[0] in UNUSUAL or name in MEASURING or name.split(".")[-1] in READY_MADE
    ]
    tree = ast.parse(source)
    imported = [alias for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names]
    modules = {alias.asname or alias.name.split(".")[0] for alias in imported} | {"dist"}
    for node in ast.walk(tree):
        name = node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""
        if name in (*UNUSUAL_NAMES, *READY_MADE) or (isinstance(node, ast.Name) and name in REACHING):
            found.append((node.lineno, f"uses {name}"))
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and _root(node) in modules | {"torch"}:
            found.append((node.lineno, f"sets {ast.unparse(node)}"))
    expected = {f"uses {name}" for name in re.findall(r"\w+", given)}
    return [f"line {line} {notice}" for line, notice in dict.fromkeys(sorted(found)) if notice not in expected]


def _root(node: ast.Attribute) -> str:
    value: ast.AST = node
    while isinstance(value, ast.Attribute):
        value = value.value
    return value.id if isinstance(value, ast.Name) else ""


def _module_names(source: str) -> list[tuple[str, int]]:
    """Return (module, line) for every module that the code imports by a statement or names in a string."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found += [(alias.name, node.lineno) for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            found += [(node.module, node.lineno)]
            found += [(f"{node.module}.{alias.name}", node.lineno) for alias in node.names]
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            ours = node.value.startswith(("shared.", "solutions.", "instructor."))
            found += [(node.value, node.lineno)] if ours else []
    return found
