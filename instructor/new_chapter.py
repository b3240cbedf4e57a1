"""Start a chapter: write all the files that it needs from the templates in instructor/templates/chapter/.

    make chapter NAME=13_tensor_parallel TITLE="Tensor parallelism"
    make chapter NAME=18_3d_parallelism TITLE="3D parallelism" MODULE=parallel_3d

The result is a small chapter that runs: a lesson, a lab with one exercise, its checks, a mutant and a variant. The lab
says `draft: true`, which keeps the chapter out of students' bundles until it is finished. If any argument is wrong,
nothing is written.
"""

import argparse
import keyword
import re
import sys
from dataclasses import dataclass
from pathlib import Path

import jinja2

from instructor import contents, start_page
from instructor.build import ROOT, Chapter, chapters, module_names
from shared.checks.terminal import show_anything

CONTENTS, README = Path("instructor/contents.py"), Path("README.md")
TEMPLATES = Path(__file__).parent / "templates" / "chapter"
AUTHOR = "**Author:**"  # Notes to the author begin with this. A finished chapter has none.
LONGEST = 60  # characters in a name or a title, so that the templates' lines stay short enough
NEXT_STEPS = """
Build and test it with `make notebooks` and `make test CHAPTER={number}`. Then replace the template's contents with your
own; docs/authoring.md says how. If the spelling check does not know a word, add the word to tests/words.txt."""


class CannotBegin(ValueError):
    """The chapter cannot be created; the message says why in one sentence."""


@dataclass(frozen=True)
class Plan:
    """The requested chapter, which does not conflict with anything that exists."""

    number: int
    name: str
    title: str
    module: str

    @property
    def folder(self) -> str:
        return f"{self.number:02d}_{self.name}"

    def files(self) -> dict[Path, str]:
        """Return the chapter's own files, by path in the repository."""
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
                "mutants.toml.jinja": f"tests/mutants/{self.folder}.toml",
                "variant.py.jinja": f"tests/variants/{self.folder}/norm_of_norms.py",
            }.items()
        }


# -- checking the arguments


def planned(name: str, title: str, module: str = "") -> Plan:
    """Check a chapter's name, title and module.

    Raises:
        CannotBegin: if anything is malformed, taken, or planned differently.
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
            raise CannotBegin(f"{path} already exists: remove it, or choose another name.")
    return plan


def _compare_with_chapters(plan: Plan) -> None:
    for chapter in chapters():
        number, name = chapter.name.split("_", 1)
        if chapter.name == plan.folder:
            raise CannotBegin(f"Chapter {plan.folder} already exists.")
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
            raise CannotBegin(f"{path} already exists: choose another module with MODULE=….")


def _compare_with_contents(plan: Plan) -> None:
    """Check that a number in instructor/contents.py has the name and title that are planned there."""
    known = contents.CHAPTERS.get(plan.number)
    if known and (known.name, known.title) != (plan.name, plan.title):
        expected = f'NAME={known.folder} TITLE="{known.title}"'
        raise CannotBegin(f"Chapter {plan.number:02d} is planned as {expected}: use this, or change {CONTENTS} first.")
    for other in contents.CHAPTERS.values():
        if other.number != plan.number and other.name == plan.name:
            raise CannotBegin(f"{CONTENTS} plans the name {plan.name} for chapter {other.folder}.")


# -- the two lists that name every chapter


def with_entry(text: str, plan: Plan) -> str:
    """Add the chapter to instructor/contents.py, if it is not planned there."""
    if plan.number in contents.CHAPTERS:
        return text
    lines = text.splitlines()
    entries = {index: found for index, line in enumerate(lines) if (found := re.match(r" +\((\d+), \".*\),$", line))}
    before = max(index for index, found in entries.items() if int(found[1]) < plan.number)
    lines.insert(before + 1, f'        ({plan.number}, "{plan.name}", "{plan.title}"),')
    return "\n".join(lines) + "\n"


def with_row(text: str, plan: Plan, minutes_text: str) -> str:
    """Add the chapter to README.md's table, and remove it from the list of chapters to come.

    Args:
        minutes_text: The minutes of its lesson and lab, such as "25 + 60".
    """
    number = f"{plan.number:02d}"
    lesson, lab, solution = (contents.notebook(kind, plan.folder) for kind in ("chapters", "labs", "solutions"))
    row = [number, f"[{plan.title}]({lesson})", f"[*to be written*]({lab})", minutes_text, f"[{number}]({solution})"]
    lines, before = [], 0
    for line in text.splitlines():
        found = re.match(r"\| (\d\d) \| \[", line)
        lines.append(_without(number, line) if "*to come:*" in line else line)
        if (found and int(found[1]) < plan.number) or lines[-1] != line:
            before = len(lines)
    lines.insert(before, f"| {' | '.join(row)} |")
    return "\n".join(lines) + "\n"


def _without(number: str, line: str) -> str:
    """Remove a chapter from `| *to come:* 13 tensor parallelism, 15 pipeline parallelism |`."""
    head, _, rest = line.partition("*to come:* ")
    to_come, bar, tail = rest.partition(" |")
    others = ", ".join(entry for entry in to_come.split(", ") if not entry.startswith(f"{number} "))
    return f"{head}*to come:* {others}{bar}{tail}" if others else f"{head.rstrip()}{bar}{tail}"


# -- writing


def begin(plan: Plan) -> list[Path]:
    """Write a chapter's files and add it to the two lists. Returns the paths of all files written."""
    files = plan.files()
    contents_text = with_entry((ROOT / CONTENTS).read_text(encoding="utf-8"), plan)
    readme = (ROOT / README).read_text(encoding="utf-8")
    for path, text in files.items():
        (ROOT / path).parent.mkdir(parents=True, exist_ok=True)
        (ROOT / path).write_text(text, encoding="utf-8")
    (ROOT / CONTENTS).write_text(contents_text, encoding="utf-8")
    chapter = Chapter(plan.folder)
    minutes_text = f"{start_page.lesson_minutes(chapter)} + {start_page.lab_minutes(chapter)}"
    (ROOT / README).write_text(with_row(readme, plan, minutes_text), encoding="utf-8")
    return [*files, README, *([] if plan.number in contents.CHAPTERS else [CONTENTS])]


def main() -> int:
    show_anything()
    parser = argparse.ArgumentParser(
        prog="python -m instructor.new_chapter", description=(__doc__ or "").split("\n")[0]
    )
    parser.add_argument("name", help="the chapter's number and name, such as 13_tensor_parallel")
    parser.add_argument("title", help="the title that readers see, such as 'Tensor parallelism'")
    parser.add_argument("--module", default="", help="the module that its lab builds; default: its name")
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
