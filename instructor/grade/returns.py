"""Pack the feedback pages of a lab for upload: `python -m instructor.grade.returns LAB`.

Canvas and Moodle give every student the page that is named as they named what the student handed in, which is in
arrival.json. In Canvas, upload the zip file with "Upload submissions" in the assignment's menu. In Moodle, choose
"Upload multiple feedback files in a zip", after switching on feedback files for the assignment. Gradescope shows
students the results of its own autograder.

Sources: `infer_comment_context_from_filename` of Canvas, mod/assign/feedback/file/importziplib.php of Moodle.
"""

import argparse
import sys
from pathlib import Path

from instructor import release
from instructor.grade import finding, lms_zips
from instructor.grade.export import lab_named
from instructor.grade.records import FOLDER
from shared.checks.terminal import show_anything


def packed(lab: str, submissions: Path, grades: Path) -> tuple[dict[str, bytes], list[str]]:
    """Return the pages by the names that the platform expects, and a sentence for each student without one."""
    files, remarks = {}, []
    for submission in finding.find(submissions, lab):
        page = grades / "feedback" / submission.student / f"{lab}.html"
        returns = finding.note_of(submission).returns
        if submission.path is None:
            remarks.append(f"{submission.student} handed in no notebook, so no page can be returned")
        elif not page.exists():
            remarks.append(f"{submission.student} has no page yet: grade the lab first")
        elif not returns:
            remarks.append(f"{submission.student} did not arrive from Canvas or Moodle, so no page can be returned")
        else:
            files[f"{returns}{lab}.html"] = page.read_bytes()
    return files, remarks


def main() -> int:
    show_anything()
    parser = argparse.ArgumentParser(
        prog="python -m instructor.grade.returns", description=(__doc__ or "").split("\n")[0]
    )
    parser.add_argument("lab", type=lab_named, help="such as 02 or 02_manual_ddp")
    parser.add_argument("--submissions", type=Path, default=lms_zips.FOLDER, help="default: submissions")
    parser.add_argument("--grades", type=Path, default=FOLDER, help="default: build/grades")
    options = parser.parse_args()
    if not options.submissions.is_dir():
        parser.error(f"there is no folder {options.submissions}")
    files, remarks = packed(options.lab, options.submissions, options.grades)
    path = options.grades / f"feedback-{options.lab}.zip"
    if files:
        path.write_bytes(release.as_zip(files))
        print(f"Wrote {path}: {len(files)} page{'' if len(files) == 1 else 's'}.")
    for remark in remarks:
        print(f"  {remark}")
    return 0 if files else 1


if __name__ == "__main__":
    sys.exit(main())
