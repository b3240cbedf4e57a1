"""Read a student's code before it runs: find what does not compile, what is forbidden, and what to show the instructor.

Nothing is executed here. This catches obvious copying. Hidden copying is caught only if it fails at run time.
"""

import ast
import re

from IPython.core.inputtransformer2 import TransformerManager

_MAGIC_LINE = re.compile(r"^([ \t]*)get_ipython\(\)\.\w+\(.*\)$", re.MULTILINE)  # as IPython translates it
NOT_CODE = (SyntaxError, ValueError, RecursionError, MemoryError)  # the errors for a text that Python cannot read
FORBIDDEN = {
    "shared.checks": "contains the checks of the exercises",
    "instructor": "contains the grader",
    "labs": "contains scripts that show parts of solutions",
    "shared.data.published_schedules": "contains schedules that exercises ask for",  # for a figure of lesson 15
}
UNUSUAL = ("ctypes", "gc", "importlib", "inspect", "mmap", "multiprocessing", "os", "pickle", "signal", "socket")
UNUSUAL += ("subprocess", "sys", "tempfile", "threading", "asyncio", "pathlib", "shelve", "shutil", "sqlite3")
UNUSUAL += ("pkgutil", "operator", "runpy", "builtins", "io", "codecs", "atexit", "faulthandler")
SYSTEM = ("ctypes", "importlib", "os", "socket", "subprocess", "sys")  # attributes of many modules
# Ranks can exchange values through files as well.
FILES = ("torch.load", "torch.save", "numpy.load", "numpy.save", "numpy.memmap")
MEASURING = (
    "shared.wire.mismatch",
    "shared.ranks.doctor",
    "shared.ranks.rankside",
    "shared.wire.instrumentation",
)  # Code that imports these could rewrite what they have recorded. A person should look at it.
# Students may not use these where they build their own.
READY_MADE = ("DistributedDataParallel", "FullyShardedDataParallel", "ZeroRedundancyOptimizer", "fully_shard")
READY_MADE += ("DistributedSampler", "average_parameters", "_sync_module_states", "_sync_params_and_buffers")
READY_MADE += ("_broadcast_coalesced",)
READY_MADE_MODULES = ("torch.distributed._composable", "torch.distributed.algorithms", "torch.distributed.optim")
READY_MADE_MODULES += ("torch.distributed.pipelining", "torch.distributed.tensor.parallel")
SHARDING = ("DTensor",)  # It communicates by itself, so a person should check how it is used.
REACHING = ("__import__", "globals", "open", "setattr", "vars")  # as functions; methods may have these names
UNUSUAL_NAMES = ("resolve_name", "attrgetter", "methodcaller", "import_module")
UNUSUAL_NAMES += ("__builtins__", "__reduce__", "__subclasses__", "_getframe", "_exit", "eval", "exec", "kill", "fork")
UNUSUAL_NAMES += ("__globals__", "__closure__", "__code__", "cell_contents", "settrace", "setprofile")
# A person should look at these. Students may have such names of their own, too.
UNUSUAL_NAMES += ("FileStore", "HashStore", "TCPStore", "_get_backend", "__traceback__", "tb_frame", "f_back")
UNUSUAL_NAMES += ("f_globals", "f_locals", "gi_frame", "_get_default_store", "from_file", "fromfile", "tofile", "_C")
UNUSUAL_NAMES += ("Reducer", "_listeners", "before_launch", "work_wrappers")


def problem(source: str, where: str = "") -> str:
    """Return why a cell cannot be loaded, or "" if it compiles. `where` names the cell, before the number of a line."""
    try:
        source.encode()
        compile(source, "cell", "exec")
    except NOT_CODE as error:
        line = f"{where}line {error.lineno}: " if isinstance(error, SyntaxError) and error.lineno else ""
        message = error.msg if isinstance(error, SyntaxError) else str(error)
        return f"the cell does not compile: {line}{type(error).__name__}: {message}"
    return ""


def without_magics(source: str) -> str:
    """Replace lines such as `%time f()`, `!ls` and `?f`, which only a notebook can run, with `pass`."""
    if not problem(source):
        return source
    code = source.strip("\n")  # transform_cell changes the number of empty lines at the top and at the end.
    rest = _MAGIC_LINE.sub(r"\1pass", TransformerManager().transform_cell(code)).removesuffix("\n")
    kept = not problem(rest) and rest.count("\n") == code.count("\n")
    return source.replace(code, rest) if kept else source


def lends(source: str) -> set[str]:
    """Return the names of functions, classes and values that other cells can use after this one."""
    try:
        statements = ast.parse(source).body
    except NOT_CODE:
        return set()
    names: set[str] = set()
    for statement in statements:
        if isinstance(statement, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            names.add(statement.name)
        elif not isinstance(statement, (ast.Import, ast.ImportFrom)):
            names |= names_of(statement)[0]
    return names


def used_by(source: str) -> set[str]:
    """Return the names that some code uses; none if it does not compile."""
    try:
        return names_of(ast.parse(source))[1]
    except NOT_CODE:
        return set()


def names_of(tree: ast.AST) -> tuple[set[str], set[str]]:
    """Return the names that some part of a syntax tree defines and those that it uses."""
    stored, loaded = set(), set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Name):
            (loaded if isinstance(node.ctx, ast.Load) else stored).add(node.id)
        elif isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            stored.add(node.name)
        elif isinstance(node, (ast.Import, ast.ImportFrom)):
            stored |= {alias.asname or alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.arg):
            stored.add(node.arg)
    return stored, loaded


def forbidden(source: str, withheld: tuple[str, ...], allowed: tuple[str, ...] = ()) -> list[str]:
    """Return where an exercise uses the checks, the grader, or code that it should not have.

    Args:
        withheld: The modules of solutions/ that students have not been given.
        allowed: The ready-made code that the lab itself uses.
    """
    return [f"line {line} uses {name}" for line, name in _forbidden_uses(source, withheld, allowed)]


def why_forbidden(source: str, withheld: tuple[str, ...], allowed: tuple[str, ...] = ()) -> str:
    """Return a sentence for each name that an exercise must not use, which says what it is. Arguments: as above."""
    return " ".join(f"{name} {_what_is(name)}." for _, name in _forbidden_uses(source, withheld, allowed))


def _what_is(forbidden_name: str) -> str:
    if forbidden_name in FORBIDDEN:
        return FORBIDDEN[forbidden_name]
    if forbidden_name in (*READY_MADE, *READY_MADE_MODULES):
        return "is ready-made code for what this lab asks you to write"
    return "is a solution that you do not have yet"


def _forbidden_uses(source: str, withheld: tuple[str, ...], allowed: tuple[str, ...]) -> list[tuple[int, str]]:
    """Return the names of what is forbidden, each with the first line that uses it, in the order of these lines."""
    found, tree = [], ast.parse(source)
    full_names = _full_names(tree)
    uses = [(_in_full(node, full_names), node.lineno) for node in ast.walk(tree) if isinstance(node, ast.Attribute)]
    ready_made = {*READY_MADE, *READY_MADE_MODULES} - {*allowed}
    refused_modules = (*FORBIDDEN, *withheld, *(name for name in ready_made if "." in name))
    for name, line in [*_module_names(source), *uses]:
        found += [(line, module) for module in refused_modules if f"{name}.".startswith(f"{module}.")]
    for node in ast.walk(tree):
        found += [(line, name) for name, line in _names_in(node) if name in ready_made]
    first = {name: line for line, name in sorted(found, reverse=True)}
    return sorted((line, name) for name, line in first.items())


def _names_in(node: ast.AST) -> list[tuple[str, int]]:
    """Return the name and the line of the attribute, variable or import that a node stands for, if any."""
    if isinstance(node, ast.Attribute):
        return [(node.attr, node.lineno)]
    if isinstance(node, ast.Name):
        return [(node.id, node.lineno)]
    if isinstance(node, ast.alias):
        return [(node.name.split(".")[-1], node.lineno)]
    return []


def notices(source: str, given: str = "") -> list[str]:
    """Return what an instructor should look at. These notices cost no points.

    Args:
        given: The lab's own code. Names that it uses are not reported.
    """
    library = (*READY_MADE, *SHARDING)
    found = [
        (line, f"uses {name}")
        for name, line in _module_names(source)
        if name.split(".")[0] in UNUSUAL or name in (*MEASURING, *FILES) or name.split(".")[-1] in library
    ]
    tree = ast.parse(source)
    full_names = _full_names(tree)
    imported = [alias for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names]
    modules = {alias.asname or alias.name.split(".")[0] for alias in imported} | {"dist"}
    for node in ast.walk(tree):
        name = node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""
        unusual = (*UNUSUAL_NAMES, *library, *(REACHING if isinstance(node, ast.Name) else ()))
        if isinstance(node, ast.Attribute | ast.Name) and name in unusual:
            found.append((node.lineno, f"uses {name}"))
        if isinstance(node, ast.Attribute) and name in (*UNUSUAL, "__dict__") and _root(node) in modules | {"torch"}:
            found.append((node.lineno, f"uses {_dotted(node)}"))  # torch.os is os, too
        if isinstance(node, ast.Attribute) and name in SYSTEM and _root(node) not in modules | {"torch"}:
            found.append((node.lineno, f"uses {name}"))  # A module may have another name, as in `core = dist`.
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and _root(node) in modules | {"torch"}:
            found.append((node.lineno, f"sets {_dotted(node)}"))
        if isinstance(node, ast.Attribute) and (full := _in_full(node, full_names)) in (*MEASURING, *FILES):
            found.append((node.lineno, f"uses {full}"))
        if isinstance(node, ast.Call) and _computes_a_name(node):
            found.append((node.lineno, "computes the name of an attribute"))
    expected = {f"uses {name}" for name in re.findall(r"\w+", given)}
    return [f"line {line} {notice}" for line, notice in dict.fromkeys(sorted(found)) if notice not in expected]


def _dotted(node: ast.Attribute) -> str:
    """Return an attribute as the code names it, such as torch.os.path, or "" if it does not begin with a variable."""
    names: list[str] = []
    value: ast.AST = node
    while isinstance(value, ast.Attribute):
        names, value = [value.attr, *names], value.value
    return ".".join([value.id, *names]) if isinstance(value, ast.Name) else ""


def _root(node: ast.Attribute) -> str:
    return _dotted(node).partition(".")[0]


def _full_names(tree: ast.AST) -> dict[str, str]:
    """Return the full name of everything that some code imports, by the name that it has there."""
    found = {"torch": "torch", "dist": "torch.distributed"}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {alias.asname: alias.name for alias in node.names if alias.asname}
            found |= {top: top for alias in node.names if not alias.asname for top in [alias.name.split(".")[0]]}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found |= {alias.asname or alias.name: f"{node.module}.{alias.name}" for alias in node.names}
    return found


def _in_full(node: ast.Attribute, full_names: dict[str, str]) -> str:
    """Return an attribute's full name, such as shared.wire.instrumentation for wire.instrumentation, or ""."""
    root, _, rest = _dotted(node).partition(".")
    return f"{full_names[root]}.{rest}" if root in full_names else ""


def _computes_a_name(call: ast.Call) -> bool:
    """Return whether a call reads an attribute whose name is not in the code."""
    is_getattr = isinstance(call.func, ast.Name) and call.func.id == "getattr" and len(call.args) > 1
    return is_getattr and not isinstance(call.args[1], ast.Constant)


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
