"""Take a newer version of the course without losing what a student has written: `make update`.

Running cells changes tracked notebooks, so `git pull` would stop with conflicts. This program first copies every
changed file into a folder of `mine/`, then takes the new version, and puts the student's code back into the exercises
of the labs. An exercise is recognized by the names that its original cell defines, because the ids of cells shift.
"""

import ast
import copy
import json
import shutil
import subprocess
import sys
from datetime import datetime
from pathlib import Path

ROOT = Path(__file__).resolve().parent
KEPT = "mine"


class CannotUpdate(Exception):
    """The update cannot begin; nothing was changed. The message says what to do."""


def git(*arguments: str, root: Path) -> str:
    """Run git and return what it prints.

    Raises:
        CannotUpdate: If git fails. Its message is what git says.
    """
    done = subprocess.run(["git", *arguments], cwd=root, capture_output=True, text=True, encoding="utf-8")
    if done.returncode:
        raise CannotUpdate(f"git {arguments[0]} failed: {(done.stderr or done.stdout).strip()}")
    return done.stdout


def update(root: Path = ROOT) -> list[str]:
    """Bring a clone to the newest version of its branch's upstream. Returns what was done, as sentences.

    Raises:
        CannotUpdate: If the folder is not a clone with an upstream, or has commits of its own.
    """
    if not (root / ".git").exists():
        raise CannotUpdate("This folder is not a clone of the course, so there is nothing to update it from.")
    git("fetch", root=root)
    try:
        newest = git("rev-parse", "@{upstream}", root=root).strip()
    except CannotUpdate:
        raise CannotUpdate("This branch follows no other: run `git branch --set-upstream-to=origin/main`.") from None
    if git("rev-parse", "HEAD", root=root).strip() == newest:
        return ["You have the newest version."]
    if git("rev-list", f"{newest}..HEAD", root=root).strip():
        raise CannotUpdate("You have made commits of your own, so git must merge: run `git pull`.")
    kept = root / KEPT / f"before-update-{datetime.now():%Y-%m-%d-%H%M%S}"
    changed = [line for line in git("diff", "--name-only", "HEAD", "-z", root=root).split("\0") if line]
    coming = git("diff", "--name-only", "--diff-filter=A", "-z", "HEAD", newest, root=root).split("\0")
    in_the_way = [name for name in coming if name and (root / name).exists() and name not in changed]
    for name in (*changed, *in_the_way):
        if (root / name).exists():
            (kept / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(root / name, kept / name)
    before = {name: json.loads(git("show", f"HEAD:{name}", root=root)) for name in changed if _is_lab(name)}
    for name in in_the_way:
        (root / name).unlink()
    git("reset", "--hard", newest, root=root)
    done = [f"The course is up to date, at {newest[:8]}."]
    for name, lab in before.items():
        if (root / name).exists() and (kept / name).exists():
            done += _put_back(root / name, json.loads((kept / name).read_bytes()), lab)
    if changed or in_the_way:
        done.append(f"Every file that you had changed is kept in {kept.relative_to(root)}/.")
    return done


def _is_lab(name: str) -> bool:
    return name.startswith("labs/") and name.endswith("_lab.ipynb")


def _put_back(path: Path, mine: dict, before: dict) -> list[str]:
    """Put a student's exercises and own cells into the new version of a lab. Returns what was done, as sentences."""
    new = json.loads(path.read_bytes())
    originals, known = _originals(before), {cell["id"] for cell in before["cells"]}
    by_names = {_names(source): cell_id for cell_id, source in _originals(new).items()}
    place = {cell_id: by_names.get(_names(source)) for cell_id, source in originals.items()}
    cells = {cell["id"]: cell for cell in new["cells"]}
    exercises, own, previous = 0, 0, None
    for cell in mine["cells"]:
        source, cell_id = "".join(cell["source"]), cell["id"]
        is_written = cell_id in originals and source != originals[cell_id]
        if is_written and place[cell_id] is not None:
            cells[place[cell_id]]["source"] = source.splitlines(keepends=True)
            exercises += 1
        elif is_written or cell_id not in known:  # the exercise is gone, or the student added the cell
            _insert(new["cells"], place.get(previous) or previous, cell)
            own += 1
        previous = cell_id
    path.write_text(json.dumps(new, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    counted = f"{exercises} exercise{'s' * (exercises != 1)} and {own} cell{'s' * (own != 1)} of your own"
    return [f"{path.name}: {counted} are in the new version. Run it from its first cell."]


def _insert(cells: list[dict], after: str | None, cell: dict) -> None:
    """Insert a student's own cell after the one that it followed, or at the end if that is gone."""
    cell = copy.deepcopy(cell)
    if cell["cell_type"] == "code":
        cell.update(outputs=[], execution_count=None)
    index = next((index for index, each in enumerate(cells) if each["id"] == after), len(cells) - 1)
    cells.insert(index + 1, cell)


def _originals(lab: dict) -> dict[str, str]:
    return lab["metadata"].get("course", {}).get("originals", {})


def _names(source: str) -> tuple[str, ...]:
    """Return the functions, classes and variables that a cell defines, by which an exercise is recognized."""
    try:
        statements = ast.parse("#" + source if source.startswith("%%") else source).body
    except SyntaxError:
        return ()
    named = [each.name for each in statements if isinstance(each, ast.FunctionDef | ast.ClassDef)]
    assigned = [each.targets[0] for each in statements if isinstance(each, ast.Assign)]
    return tuple(named or [each.id for each in assigned if isinstance(each, ast.Name)])


def main() -> int:
    try:
        print("\n".join(update()))
    except CannotUpdate as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
