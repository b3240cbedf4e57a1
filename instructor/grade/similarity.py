"""Reduce code to what its author decided, so that copies look alike whatever names they use, and honest work does not.

What was handed out is left out, as it is the same for everybody: lines of the exercise's cell, docstrings, annotations.
Comments and spaces go too. Names that the code itself gives are numbered in the order in which they appear.
"""

import ast
import re

NAME = re.compile(r"(\.?)\b([^\W\d]\w*)\b(?!=(?!=))")  # but no keyword of a call, which ast.unparse() writes as x=1
COMMENT = re.compile(r"#[^\n]*")


def essence(code: str, given: str = "") -> str:
    """Return what is left of some code.

    Args:
        given: The exercise's code as it was handed out.
    """
    theirs, ours = _plain(code), _plain(given)
    handed_out = set(ours.splitlines())
    left = "\n".join(line for line in theirs.splitlines() if line not in handed_out)
    own, numbers = _given_names(theirs), {}

    def number(found: re.Match) -> str:
        dot, name = found.groups()  # An attribute and a variable of the same name are two things.
        return f"{dot}v{numbers.setdefault((dot, name), len(numbers))}" if (dot, name) in own else found[0]

    return re.sub(r"\s+", "", NAME.sub(number, left))


def _plain(code: str) -> str:
    """Return code without comments, docstrings and annotations.

    Code that does not compile, or that is nested too deeply, loses only its comments.
    """
    try:
        return _bare(ast.parse(code))
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return COMMENT.sub("", code)


def _bare(tree: ast.AST) -> str:
    """Return the code of a syntax tree without comments, docstrings and annotations."""
    for node in ast.walk(tree):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)) and ast.get_docstring(node):
            node.body = node.body[1:] or [ast.Pass()]
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            node.returns = None
        if isinstance(node, ast.arg):
            node.annotation = None
    return ast.unparse(_WithoutAnnotations().visit(tree))


class _WithoutAnnotations(ast.NodeTransformer):
    def visit_AnnAssign(self, node: ast.AnnAssign) -> ast.AST | None:
        value = node.value or ast.Constant(None)
        return ast.copy_location(ast.Assign([node.target], value, lineno=node.lineno), node)


def _given_names(code: str) -> set[tuple[str, str]]:
    """Return the names of variables, arguments and attributes that some code defines, attributes with a dot."""
    try:
        nodes = list(ast.walk(ast.parse(code)))
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return set()
    stored = [node for node in nodes if isinstance(getattr(node, "ctx", None), ast.Store)]
    names = {node.id for node in stored if isinstance(node, ast.Name)}
    names |= {node.arg for node in nodes if isinstance(node, ast.arg)}
    attributes = {node.attr for node in stored if isinstance(node, ast.Attribute)}
    return {("", name) for name in names} | {(".", name) for name in attributes}
