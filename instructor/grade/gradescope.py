"""Write a lab's autograder for Gradescope: `make gradescope CHAPTER=02`, or `python -m instructor.grade.gradescope 02`.

The zip has setup.sh and run_autograder at its top, as Gradescope's "Autograder Specifications" say, and this course
beside them. Gradescope builds an image with setup.sh, and then starts a container for each submission, in which

    python -m instructor.grade.gradescope --run SUBMISSION RESULTS

grades the notebook and writes results.json. A container may not create the namespaces that bubblewrap needs. So the
container is the sandbox: the course's own folder can only be read by root, and the judge runs as another user.
"""

import argparse
import os
import shutil
import sys
import tempfile
from dataclasses import replace
from pathlib import Path

from instructor import release
from instructor.build import ROOT, Chapter, chapters
from instructor.grade import cgroup, course, finding, gradebook, grading, outputs, sandbox
from instructor.grade.limits import Limits
from shared.checks.terminal import show_anything

FOLDER = ROOT / "build" / "gradescope"
NEEDED = ("instructor", "shared", "source", "solutions", "chapters", "labs")
STUDENT = "student"
# Gradescope's defaults are half a CPU, 0.77 GB and 10 minutes (its documentation, "Troubleshooting"). Grading our own
# solution of lab 02 held 1.04 GB and took 69 s on two busy cores. Code that hangs takes up to 9 minutes longer.
# The grader itself holds 0.4 GB.
LEAST_BYTES, OWN_BYTES = 2_000_000_000, 500_000_000
CONTAINER = "at least 2 CPUs and 3 GB of memory, and a timeout of 40 minutes: the defaults are too small"
SETUP = """#!/usr/bin/env bash
# Gradescope runs this once, when it builds the image.
set -eu
export DEBIAN_FRONTEND=noninteractive
apt-get update
apt-get install -y python3 python3-venv
python=python3
if ! python3 -c 'import sys; sys.exit(sys.version_info < (3, 11))'; then
    # Ubuntu 22.04, Gradescope's usual base image, has Python 3.10. Its own python3 must stay as it is.
    apt-get install -y software-properties-common
    add-apt-repository -y ppa:deadsnakes/ppa
    apt-get install -y python3.12 python3.12-venv
    python=python3.12
fi
cd "${AUTOGRADER:-/autograder}/source/course"
venv="${COURSE_VENV:-/opt/course}"
"$python" -m venv "$venv"
"$venv/bin/pip" install --quiet -c constraints.txt torch --index-url https://download.pytorch.org/whl/cpu
"$venv/bin/pip" install --quiet -c constraints.txt ".[dev]"
"""
RUN = """#!/usr/bin/env bash
# Gradescope runs this for each submission.
set -eu
top="${{AUTOGRADER:-/autograder}}"
chmod 700 "$top/source" "$top/results"
cd "$top/source/course"
export GRADE_SANDBOX=container
python="${{COURSE_PYTHON:-/opt/course/bin/python}}"
"$python" -m instructor.grade.gradescope --run "$top/submission" "$top/results" {number}
"""


def autograder(number: int) -> dict[str, bytes]:
    """Return the files of a chapter's autograder, by their path in the zip."""
    release.bundle(number)  # This raises the error for a chapter that does not exist.
    files = {f"course/{name}": (ROOT / name).read_bytes() for name in release.TOP}
    files |= {f"course/{name}": path.read_bytes() for name, path in release.course_files(*NEEDED).items()}
    scripts = {"setup.sh": SETUP, "run_autograder": RUN.format(number=f"{number:02d}")}
    return files | {name: text.encode() for name, text in scripts.items()}


def too_small(limit_bytes: int | None) -> str:
    """Return what to say if a container may not use enough memory, or ""."""
    if limit_bytes is None or limit_bytes >= LEAST_BYTES:
        return ""
    return (
        f"Not graded: this container may use {limit_bytes / 1e9:.2f} GB of memory, and grading needs "
        f"{LEAST_BYTES / 1e9:g} GB. The code that was handed in is not the cause. Instructor: in the assignment's "
        f"autograder settings, choose {CONTAINER}. Then run the autograder again for all submissions."
    )


def run(handed_in: Path, results: Path, chapter: Chapter) -> None:
    """Grade the notebook in a folder, and write results.json into another folder."""
    sandbox.require()
    limit_bytes = cgroup.limit_bytes()
    if why := too_small(limit_bytes):  # Otherwise the system would end the grader, and nobody would know why.
        print(why, flush=True)
        results.mkdir(parents=True, exist_ok=True)
        return gradebook.write_failure(why, results / "results.json")
    limits = Limits()
    if limit_bytes is not None:
        limits = replace(limits, memory_bytes=min(limits.memory_bytes, limit_bytes - OWN_BYTES))
    with tempfile.TemporaryDirectory() as temporary, course.unpacked(chapter) as judged_with:
        folder = Path(temporary) / STUDENT / chapter.name
        shutil.copytree(handed_in, folder, symlinks=True)
        (submission,) = finding.find(Path(temporary), chapter.name)
        record = outputs.with_arrival(grading.grade(submission, judged_with, limits), submission)
    results.mkdir(parents=True, exist_ok=True)
    gradebook.write_results(record, results / "results.json")


def main() -> int:
    show_anything()
    parser = argparse.ArgumentParser(
        prog="python -m instructor.grade.gradescope", description=(__doc__ or "").split("\n")[0]
    )
    parser.add_argument("chapter", help="the chapter's number, such as 02")
    parser.add_argument("--run", nargs=2, type=Path, metavar=("SUBMISSION", "RESULTS"), help="what run_autograder does")
    parser.add_argument("--folder", type=Path, default=FOLDER, help="default: build/gradescope")
    options = parser.parse_args()
    chapter = next((each for each in chapters() if f"{release.number_of(each):02d}" == options.chapter), None)
    if chapter is None:
        parser.error(f"the chapter must be a number such as 02, got {options.chapter!r}")
    if options.run:
        os.umask(0o022)
        try:
            handed_in, results = options.run
            run(handed_in, results, chapter)
        except (grading.NotGraded, sandbox.NoSandbox) as error:  # Without results, Gradescope reports a failure.
            print(f"Not graded, so run the autograder again. The code that was handed in is not the cause: {error}")
            return 1
        return 0
    try:
        files = autograder(int(options.chapter))
    except release.ReleaseError as error:
        parser.error(str(error))
    packed = options.folder / f"autograder-{options.chapter}.zip"
    packed.parent.mkdir(parents=True, exist_ok=True)
    packed.write_bytes(release.as_zip(files, executable=("setup.sh", "run_autograder")))
    size_mb = packed.stat().st_size / 1e6
    print(f"Wrote {packed} ({size_mb:.1f} MB). Upload it as the autograder of a programming assignment.")
    print(f"In the assignment's autograder settings, choose {CONTAINER}.")
    return 0


if __name__ == "__main__":
    sys.exit(main())
