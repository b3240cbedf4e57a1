"""Is every word of the prose an English one, or one of tests/words.txt? `python -m tests.spelling`

Prose is what people read: Markdown, and of Python the comments, docstrings and messages. Lessons and labs are read
where they are written, in source/. Code in backticks, formulas, addresses and names with dots, digits or underscores
are left out. A dictionary finds what a list of known misspellings does not: `shrad`, `gradeint`.
"""

import ast
import io
import re
import sys
import tokenize
from collections.abc import Iterable, Iterator
from pathlib import Path

from spellchecker import SpellChecker

ROOT = Path(__file__).resolve().parent.parent
FOLDERS = ("benchmarks", "instructor", "labs", "shared", "source", "tests")
WORDS = ROOT / "tests" / "words.txt"
NOT_PROSE = re.compile(
    r"^```.*?^```|\bnoqa:.*|`[^`]*`|\$\$.*?\$\$|\$[^$\n]+\$|\\[a-z]+|https?://\S+|</?[a-z][^>]*>"  # code and formulas
    r"|[^\s(]*(?:[_=\\@{}\[\]/<>]|\w[.:]\w|\d)[^\s)]*",  # names of files, variables and machines
    re.DOTALL | re.MULTILINE,
)
WORD = re.compile(r"(?<![\w’'])[A-Za-z][a-z]{2,}(?![A-Za-z_])")  # GPT, fp32 and ManualDDP are none
MESSAGE_WORDS = 4  # a string with as many is said to somebody


def python_prose(code: str, messages: bool) -> Iterator[tuple[int, str]]:
    """Yield comments, docstrings and perhaps messages, each with its first line's number."""
    lines: list[str] = []
    began = 0
    for token in tokenize.generate_tokens(io.StringIO(code).readline):
        if token.type == tokenize.COMMENT and not token.string.startswith("# %%"):
            if token.start[0] != began + len(lines):  # comments on consecutive lines are one text
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
    text, messages = path.read_text(), "tests" not in path.parts  # tests quote code, and what is wrong
    for began, prose in python_prose(text, messages) if path.suffix == ".py" else [(1, text)]:
        for number, word in words_of(prose):
            yield began + number, word


def misspelled(paths: Iterable[Path], known: Iterable[str]) -> Iterator[str]:
    """Yield `file:line: word` with what may have been meant, for each word that nobody knows."""
    dictionary = SpellChecker(distance=1)  # 2 takes seconds for a long word
    dictionary.word_frequency.load_words(known)
    found = [(path, *place) for path in paths for place in words_in(path)]
    unknown = dictionary.unknown({word for _, _, word in found})
    for path, line, word in found:
        if word in unknown:
            meant = dictionary.correction(word)
            yield f"{path}:{line}: {word}" + (f", is it {meant}?" if meant and meant != word else "")


def prose_files() -> list[Path]:
    """→ what people write"""
    folders = [ROOT.glob("*"), *((ROOT / folder).rglob("*") for folder in FOLDERS)]
    return sorted(path for paths in folders for path in paths if path.suffix in (".md", ".py"))


def main() -> int:
    lines = list(misspelled(prose_files(), WORDS.read_text().split()))
    print("\n".join(line.removeprefix(f"{ROOT}/") for line in lines) or "every word is known")
    if lines:
        print(f"\n{len(lines)} unknown words: mend them, or add them to {WORDS.relative_to(ROOT)}")
    return 1 if lines else 0


if __name__ == "__main__":
    sys.exit(main())
