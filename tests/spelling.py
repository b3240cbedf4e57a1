"""Check that every word of the prose is an English one or is in tests/words.txt: `python -m tests.spelling`.

Prose is Markdown, and the comments, docstrings and messages in Python. Lessons and labs are checked in source/. Code in
backticks, formulas, addresses and names with dots, digits or underscores are skipped. A dictionary also finds mistakes
that no list of common misspellings contains, such as `shrad` and `gradeint`.
"""

import ast
import io
import re
import sys
import tokenize
import tomllib
from collections.abc import Iterable, Iterator
from pathlib import Path

from spellchecker import SpellChecker

ROOT = Path(__file__).resolve().parent.parent
FOLDERS = ("benchmarks", "docs", "instructor", "labs", "shared", "source", "tests")
WORDS = ROOT / "tests" / "words.txt"
NOT_PROSE = re.compile(
    r"^```.*?^```|\bnoqa:.*|`[^`]*`|\$\$.*?\$\$|\$[^$\n]+\$|\\[a-z]+|https?://\S+|</?[a-z][^>]*>"  # code and formulas
    r"|[^\s(]*(?:[_=\\@{}\[\]/<>]|\w[.:]\w|\d)[^\s)]*",  # names of files, variables and machines
    re.DOTALL | re.MULTILINE,
)
WORD = re.compile(r"(?<![\w’'])[A-Za-z][a-z]{2,}(?![A-Za-z_])")  # GPT, fp32 and ManualDDP are not words
MESSAGE_WORDS = 4  # A string with this many words is a message.


def python_prose(code: str, messages: bool) -> Iterator[tuple[int, str]]:
    """Yield comments, docstrings and, if `messages`, other texts, each with the number of its first line."""
    lines: list[str] = []
    began = 0
    for token in tokenize.generate_tokens(io.StringIO(code).readline):
        if token.type == tokenize.COMMENT and not token.string.startswith("# %%"):
            if token.start[0] != began + len(lines):  # Comments on consecutive lines are one text.
                yield began, "\n".join(lines)
                began, lines = token.start[0], []
            lines.append(token.string.lstrip("#"))
    yield began, "\n".join(lines)
    nodes = list(ast.walk(ast.parse(code)))
    docstrings = {node.value for node in nodes if isinstance(node, ast.Expr)}
    for node in nodes:
        text = node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else ""
        if node in docstrings or (messages and len(text.split()) >= MESSAGE_WORDS):
            yield node.lineno, text


def words_of(text: str) -> Iterator[tuple[int, str]]:
    """Yield the words of a text, each with the number of lines before it."""
    blanked = NOT_PROSE.sub(lambda found: " " + "\n" * found.group().count("\n"), text)
    for number, line in enumerate(blanked.splitlines()):
        for word in WORD.findall(line):
            yield number, word.lower()


def words_in(path: Path) -> Iterator[tuple[int, str]]:
    """Yield the words of a file's prose, each with its line."""
    text, messages = path.read_text(), "tests" not in path.parts  # Tests contain code and misspelled words.
    if path.suffix == ".toml":  # a table of mutants
        proses = [(1 + text[: text.find(row["why"])].count("\n"), row["why"]) for row in tomllib.loads(text)["mutant"]]
    else:
        proses = python_prose(text, messages) if path.suffix == ".py" else [(1, text)]
    for began, prose in proses:
        for number, word in words_of(prose):
            yield began + number, word


def misspelled(paths: Iterable[Path], known: Iterable[str]) -> Iterator[str]:
    """Yield `file:line: word` and a suggestion for each unknown word."""
    dictionary = SpellChecker(distance=1)  # A distance of 2 takes seconds for a long word.
    dictionary.word_frequency.load_words(known)
    found = [(path, line, word) for path in paths for line, word in words_in(path)]
    unknown = dictionary.unknown({word for _, _, word in found})
    for path, line, word in found:
        if word in unknown:
            suggestion = dictionary.correction(word)
            yield f"{path}:{line}: {word}" + (
                f" (did you mean {suggestion}?)" if suggestion not in (None, word) else ""
            )


def prose_files() -> list[Path]:
    """Return the files that contain prose."""
    folders = [ROOT.glob("*"), *((ROOT / folder).rglob("*") for folder in FOLDERS)]
    tables = (ROOT / "tests" / "mutants").glob("*.toml")
    return sorted([*tables, *(path for paths in folders for path in paths if path.suffix in (".md", ".py"))])


def main() -> int:
    lines = list(misspelled(prose_files(), WORDS.read_text().split()))
    print("\n".join(line.removeprefix(f"{ROOT}/") for line in lines) or "Every word is known.")
    if lines:
        print(f"\n{len(lines)} unknown words. Correct them, or add them to {WORDS.relative_to(ROOT)}.")
    return 1 if lines else 0


if __name__ == "__main__":
    sys.exit(main())
