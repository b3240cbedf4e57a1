"""Begin a chapter: write every file that it needs, from the templates in instructor/templates/chapter/.

    make chapter NAME=13_tensor_parallel TITLE="Tensor parallelism"
    make chapter NAME=18_3d_parallelism TITLE="3D parallelism" MODULE=parallel_3d

The files are a small chapter that runs: a lesson, a lab with one exercise, its checks, a mutant and a variant. Its lab
says `draft: true`, which keeps it out of students' bundles until it is finished. Nothing is written if anything that
was asked for is wrong.
"""

import argparse
import keyword
import re
import sys
from dataclasses import dataclass
from pathlib import Path

import jinja2

from instructor import contents, minutes
from instructor.build import ROOT, Chapter, chapters, module_names

CONTENTS, README = Path("instructor/contents.py"), Path("README.md")
TEMPLATES = Path(__file__).parent / "templates" / "chapter"
AUTHOR = "**Author:**"  # begins each note to the author; a finished chapter has none
LONGEST = 60  # characters of a name or a title, so that no line of the templates becomes too long
NEXT_STEPS = """
Now build and test it: `make notebooks`, then `make test CHAPTER={number}`. Then replace what the templates say by your
chapter; CONTRIBUTING.md says how. If the spell-check does not know a word, add the word to tests/words.txt."""


class CannotBegin(ValueError):
    """Why there can be no such chapter, in one sentence."""


@dataclass(frozen=True)
class Plan:
    """What was asked for, checked against everything that exists."""

    number: int
    name: str
    title: str
    module: str

    @property
    def folder(self) -> str:
        return f"{self.number:02d}_{self.name}"

    def files(self) -> dict[Path, str]:
        """Return the chapter's own files, by their path in the repository."""
        environment = jinja2.Environment(
            loader=jinja2.FileSystemLoader(TEMPLATES), undefined=jinja2.StrictUndefined, keep_trailing_newline=True
        )
        names = {"number": f"{self.number:02d}", "name": self.name, "title": self.title, "module": self.module}
        return {
            Path(path): environment.get_template(template).render(names, author=AUTHOR)
            for template, path in {
                "lesson.py.jinja": f"source/{self.folder}/lesson.py",
                "lab.py.jinja": f"source/{self.folder}/lab.py",
                "checks.py.jinja": f"shared/checks/{self.module}/__init__.py",
                "mutant.py.jinja": f"tests/mutants/{self.folder}/sums_norms.py",
                "variant.py.jinja": f"tests/variants/{self.folder}/norm_of_norms.py",
            }.items()
        }


# -- checking what was asked for


def planned(name: str, title: str, module: str = "") -> Plan:
    """Check a chapter's name, title and module.

    Raises:
        CannotBegin: for what is malformed, taken, or planned differently.
    """
    if not (found := re.fullmatch(r"(\d\d)_([a-z0-9]+(?:_[a-z0-9]+)*)", name)) or len(name) > LONGEST:
        form = f"two digits and a name in lower case, at most {LONGEST} characters, such as 13_tensor_parallel"
        raise CannotBegin(f"NAME must be {form}, got {name!r}.")
    number, name, module = int(found[1]), found[2], module or found[2]
    if not title.strip():
        raise CannotBegin(f'A chapter needs a title: add TITLE="…" after NAME={found[0]}.')
    if not title.isprintable() or set(title) & set('"\\|[]`$') or len(title) > LONGEST:
        raise CannotBegin(f'TITLE may have at most {LONGEST} characters, and none of " \\ | [ ] ` $, got {title!r}.')
    if not module.isidentifier() or keyword.iskeyword(module) or module != module.lower():
        raise CannotBegin(f"{module!r} cannot be the name of a Python module: choose one with MODULE=….")
    plan = Plan(number, name, title.strip(), module)
    _compare_with_chapters(plan)
    _compare_with_modules(plan)
    _compare_with_contents(plan)
    for path in plan.files():
        if (ROOT / path).exists():
            raise CannotBegin(f"{path} exists already: remove it, or choose another name.")
    return plan


def _compare_with_chapters(plan: Plan) -> None:
    for chapter in chapters():
        number, name = chapter.name.split("_", 1)
        if chapter.name == plan.folder:
            raise CannotBegin(f"Chapter {plan.folder} exists already.")
        if int(number) == plan.number:
            raise CannotBegin(f"Number {number} is taken by chapter {chapter.name}.")
        if name == plan.name:
            raise CannotBegin(f"The name {name} is taken by chapter {chapter.name}.")


def _compare_with_modules(plan: Plan) -> None:
    for chapter in chapters():
        if plan.module in module_names(chapter):
            raise CannotBegin(f"The module {plan.module} is built by chapter {chapter.name}: choose another MODULE=….")
    for path in (f"solutions/{plan.module}.py", f"shared/checks/{plan.module}"):
        if (ROOT / path).exists():
            raise CannotBegin(f"{path} exists already: choose another module with MODULE=….")


def _compare_with_contents(plan: Plan) -> None:
    """A number that instructor/contents.py plans is planned with a name and a title."""
    known = contents.CHAPTERS.get(plan.number)
    if known and (known.name, known.title) != (plan.name, plan.title):
        expected = f'NAME={known.folder} TITLE="{known.title}"'
        raise CannotBegin(f"Chapter {plan.number:02d} is planned as {expected}: use these, or change {CONTENTS} first.")
    for each in contents.CHAPTERS.values():
        if each.number != plan.number and each.name == plan.name:
            raise CannotBegin(f"The name {plan.name} is planned for chapter {each.folder}, in {CONTENTS}.")


# -- the two lists that name every chapter


def with_entry(text: str, plan: Plan) -> str:
    """Add the chapter to instructor/contents.py, if it is not planned there."""
    if plan.number in contents.CHAPTERS:
        return text
    lines = text.splitlines()
    entries = {at: found for at, line in enumerate(lines) if (found := re.match(r" +\((\d+), \".*\),$", line))}
    before = max(at for at, found in entries.items() if int(found[1]) < plan.number)
    lines.insert(before + 1, f'        ({plan.number}, "{plan.name}", "{plan.title}"),')
    return "\n".join(lines) + "\n"


def with_row(text: str, plan: Plan, of_both: str) -> str:
    """Add the chapter to README.md's table, and take it out of the list of chapters to come.

    Args:
        of_both: The minutes of its lesson and lab.
    """
    number, file = f"{plan.number:02d}", f"{plan.folder}.ipynb"
    row = [number, f"[{plan.title}](chapters/{file})", f"[*to be written*](labs/{file})", of_both]
    row.append(f"[{number}](solutions/{file})")
    lines, before = [], 0
    for line in text.splitlines():
        found = re.match(r"\| (\d\d) \| \[", line)
        lines.append(_without(number, line) if "*to come:*" in line else line)
        if (found and int(found[1]) < plan.number) or lines[-1] != line:
            before = len(lines)
    lines.insert(before, f"| {' | '.join(row)} |")
    return "\n".join(lines) + "\n"


def _without(number: str, line: str) -> str:
    """Take a chapter out of `| *to come:* 13 tensor parallelism, 15 pipeline parallelism |`."""
    head, _, rest = line.partition("*to come:* ")
    to_come, bar, tail = rest.partition(" |")
    others = ", ".join(each for each in to_come.split(", ") if not each.startswith(f"{number} "))
    return f"{head}*to come:* {others}{bar}{tail}" if others else f"{head.rstrip()}{bar}{tail}"


# -- writing


def begin(plan: Plan) -> list[Path]:
    """Write a chapter's files and its place in the two lists. Returns their paths."""
    files = plan.files()
    contents_text = with_entry((ROOT / CONTENTS).read_text(), plan)
    readme = (ROOT / README).read_text()
    for path, text in files.items():
        (ROOT / path).parent.mkdir(parents=True, exist_ok=True)
        (ROOT / path).write_text(text)
    (ROOT / CONTENTS).write_text(contents_text)
    chapter = Chapter(plan.folder)
    both = f"{minutes.lesson_minutes(chapter)} + {minutes.lab_minutes(chapter)}"
    (ROOT / README).write_text(with_row(readme, plan, both))
    return [*files, README, *([] if plan.number in contents.CHAPTERS else [CONTENTS])]


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m instructor.new_chapter", description=__doc__.splitlines()[0])
    parser.add_argument("name", help="its number and name, such as 13_tensor_parallel")
    parser.add_argument("title", help="what readers see, such as 'Tensor parallelism'")
    parser.add_argument("--module", default="", help="what its lab builds, if its name is not to be its module's")
    options = parser.parse_args()
    try:
        plan = planned(options.name, options.title, options.module)
    except CannotBegin as reason:
        print(reason, file=sys.stderr)
        return 2
    for path in begin(plan):
        print(f"wrote {path}")
    print(NEXT_STEPS.format(number=f"{plan.number:02d}"))
    return 0


if __name__ == "__main__":
    sys.exit(main())
