"""Zip files of learning platforms become folders, and points go back into the platforms' tables."""

import csv
import io
import zipfile
from dataclasses import replace

import nbformat
import pytest

from instructor import build
from instructor.build import ROOT
from instructor.grade import command as grade
from instructor.grade import export, lms_zips, returns, sandbox
from instructor.release import as_zip
from tests.handed_in import CHAPTERS, packed
from tests.instructor.grade.test_grade import instant, rows

pytestmark = [pytest.mark.exhaustive, pytest.mark.usefixtures("unpacked_once")]

LAB = "00_ranks"
NOTEBOOK = nbformat.writes(build.solution_of(CHAPTERS[LAB]))
METADATA = """
submission_77:
  :submitters:
  - :name: Ada Lovelace
    :email: ada@example.org
  :created_at: 2026-11-30 12:00:00 +00:00
"""
ZIPS = {
    "Canvas": {
        "lovelaceada_12345_678901_00_ranks_lab.ipynb": NOTEBOOK,
        "curiemarie_LATE_12346_678902_00_ranks_lab-1.ipynb": NOTEBOOK,
    },
    "Moodle": {
        "Ada Lovelace_12345_assignsubmission_file/00_ranks_lab.ipynb": NOTEBOOK,
        "Marie Curie_12346_assignsubmission_file/00_ranks_lab.ipynb": NOTEBOOK,
    },
    "Gradescope": {
        "assignment_9_export/submission_77/00_ranks_lab.ipynb": NOTEBOOK,
        "assignment_9_export/submission_78/00_ranks_lab.ipynb": NOTEBOOK,
        "assignment_9_export/submission_metadata.yml": METADATA,
    },
}
STUDENTS = {
    "Canvas": ["curiemarie_12346", "lovelaceada_12345"],
    "Moodle": ["Ada Lovelace_12345", "Marie Curie_12346"],
    "Gradescope": ["Ada Lovelace_77", "student_78"],
}


def graded_from(tmp_path, monkeypatch, platform: str):
    monkeypatch.setattr(sandbox, "require", lambda: None)
    lms_zips.unpack(packed(tmp_path, ZIPS[platform]), tmp_path / "in")
    return grade.grade_all(tmp_path / "in", tmp_path / "out", grader=instant)


@pytest.mark.parametrize("platform", ZIPS)
def test_a_platforms_zip_file_becomes_a_folder_per_student(tmp_path, monkeypatch, platform):
    records = graded_from(tmp_path, monkeypatch, platform)
    assert [(record.student, record.points) for record in records] == [(name, 15.0) for name in STUDENTS[platform]]
    stamps = [path.parent.parent.name for path in (tmp_path / "in").glob("*/*/timestamp.txt")]
    assert stamps == (["Ada Lovelace_77"] if platform == "Gradescope" else [])


def test_nothing_in_a_zip_file_leaves_its_folder(tmp_path):
    link = zipfile.ZipInfo("c_3_3_00_ranks_lab.ipynb")
    link.external_attr = 0o120777 << 16
    files = {
        "../../evil_1_1_00_ranks_lab.ipynb": NOTEBOOK,
        "..\\..\\.._2_2_00_ranks_lab.ipynb": NOTEBOOK,
        link: "/etc/passwd",
        "d_4_4_homework.ipynb": "{}",
    }
    written, left_out = lms_zips.unpack(packed(tmp_path, files), tmp_path / "sub" / "in")
    assert all((tmp_path / "sub" / "in").resolve() in path.resolve().parents for path in written) and len(written) == 2
    assert len(left_out) == 2 and "is a link" in left_out[0] and "not named like a lab" in left_out[1]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["download.zip", "sub"]


def test_whoever_handed_in_no_notebook_gets_a_row_and_all_remarks_are_sentences(tmp_path, monkeypatch):
    """A student who handed in a PDF once had no row in any table, and nobody was told."""
    files = {
        "adalovelace_1_11_00_ranks_lab.ipynb": NOTEBOOK,
        "__MACOSX/._adalovelace_1_11_00_ranks_lab.ipynb": "resource fork",
        "curiemarie_LATE_2_12_00_ranks_lab-1.ipynb": NOTEBOOK,
        "curiemarie_LATE_2_12_00_ranks_old.ipynb": NOTEBOOK,
        "noetheremmy_3_13_report.pdf": "%PDF",
    }
    written, remarks = lms_zips.unpack(packed(tmp_path, files), tmp_path / "in")
    assert [path.parent.parent.name for path in written] == ["adalovelace_1", "curiemarie_2"]
    assert written[0].read_text() == NOTEBOOK
    stamp = written[1].parent / "timestamp.txt"
    assert remarks == [
        "curiemarie_2: 00_ranks_lab-1.ipynb is graded, and this is not: 00_ranks_old.ipynb (the same)",
        "noetheremmy_3 handed in no notebook, but noetheremmy_3_13_report.pdf",
        f"some notebooks are late, but Canvas does not say how late: write the time into {stamp}",
    ]
    monkeypatch.setattr(sandbox, "require", lambda: None)
    graded_too = grade.grade_all(tmp_path / "in", tmp_path / "out", grader=instant)
    assert [record.student for record in graded_too] == ["adalovelace_1", "curiemarie_2", "noetheremmy_3"]


def test_only_notebooks_without_a_time_are_asked_about(tmp_path):
    """A second run once asked for a time that was there, and was silent about notebooks that had none."""
    names = {f"{name}_LATE_{n}_1{n}_00_ranks_lab.ipynb": NOTEBOOK for n, name in enumerate(("ada", "emmy", "lise"), 1)}
    zipped, asked = packed(tmp_path, names), []
    for number in range(4):
        written, remarks = lms_zips.unpack(zipped, tmp_path / "in")
        stamps = [path.parent / "timestamp.txt" for path in written]
        late = " and ".join(map(str, stamps[number:]))
        assert remarks == (
            [f"some notebooks are late, but Canvas does not say how late: write the time into {late}"] if late else []
        )
        asked.append(lms_zips.about_times(written).split(". ")[0])
        for stamp in stamps[: number + 1]:
            stamp.write_text("2026-12-01T22:00:00+01:00")
    whose = ("any notebook", "the notebooks of emmy_2, lise_3", "the notebooks of lise_3")
    assert asked == [*(f"There is no timestamp.txt beside {each}" for each in whose), ""]


def test_a_time_stays_with_the_notebook_that_was_handed_in_then(tmp_path):
    files = {"ada_1_11_00_ranks_lab.ipynb": NOTEBOOK}
    (path,), _ = lms_zips.unpack(packed(tmp_path, files), tmp_path / "in")
    stamp = path.parent / "timestamp.txt"
    stamp.write_text("2026-12-01T22:00:00+01:00")
    lms_zips.unpack(packed(tmp_path, files), tmp_path / "in")
    assert stamp.exists()
    lms_zips.unpack(packed(tmp_path, {name: "{}" for name in files}), tmp_path / "in")
    assert not stamp.exists()


def test_what_students_handed_in_is_not_committed():
    ignored = (ROOT / ".gitignore").read_text().splitlines()
    assert f"/{lms_zips.FOLDER.relative_to(ROOT).as_posix()}/" in ignored


@pytest.mark.parametrize("text", ["no zip", None], ids=["no zip file", "no notebook"])
def test_a_file_without_submissions_is_rejected_in_one_sentence(tmp_path, text):
    path = packed(tmp_path, {"readme.txt": ""})
    if text:
        path.write_text(text)
    with pytest.raises(lms_zips.NotAnArchive, match=r"cannot be read|has no file that is named as"):
        lms_zips.unpack(path, tmp_path / "in")


TABLES = {
    "Canvas": 'Student,ID,SIS Login ID,Section,00_ranks (99)\n Points Possible,,,,15\n"Lovelace, Ada",12345,ada,1,\n'
    '"Curie, Marie",12346,marie,1,\n"Noether, Emmy",12347,emmy,1,\n',
    "Moodle": "Identifier,Full name,Grade,Maximum Grade\nParticipant 12345,Ada Lovelace,,15.00\n"
    "Participant 12346,Marie Curie,,15.00\n",
}


WITHOUT_POINTS = "nothing was written for Noether, Emmy: there is no submission here"


@pytest.mark.parametrize("platform", TABLES)
def test_points_go_back_into_a_platforms_table(tmp_path, monkeypatch, platform):
    graded_from(tmp_path, monkeypatch, platform)
    table = tmp_path / "export.csv"
    table.write_text(TABLES[platform])
    text, missing = export.exported(LAB, tmp_path / "out", table)
    column = "Grade" if platform == "Moodle" else "00_ranks (99)"
    points = [row[column] for row in csv.DictReader(io.StringIO(text))]
    assert points == (["15", "15"] if platform == "Moodle" else ["15", "15", "15", ""])
    assert missing == ([] if platform == "Moodle" else [WITHOUT_POINTS])


def test_whoever_could_not_be_graded_or_is_locked_keeps_an_empty_cell_and_is_named(tmp_path, monkeypatch):
    """A file that is no notebook once became 0 points on the platform, and a locked grade was lost without a word."""

    def grader(submission, course, limits):
        record = instant(submission, course, limits)
        unreadable = submission.student.startswith("Marie")
        answers = [replace(answer, points=0.0, reason="it was cut off") for answer in record.answers]
        return replace(record, reason="it was cut off", answers=answers) if unreadable else record

    monkeypatch.setattr(sandbox, "require", lambda: None)
    files = {f"{name}_assignsubmission_file/00_ranks_lab.ipynb": NOTEBOOK for name in ("Ada_1", "Marie_2", "Lise_3")}
    lms_zips.unpack(packed(tmp_path, files), tmp_path / "in")
    table = tmp_path / "export.csv"
    table.write_text(
        "Identifier,Full name,Grade,Maximum Grade,Grade can be changed\nParticipant 1,Ada,,15,Yes\n"
        "Participant 2,Marie,,15,Yes\nParticipant 3,Lise,,15,No\nParticipant 4,Emmy,,15,Yes\n"
    )

    def run():
        grade.grade_all(tmp_path / "in", tmp_path / "out", grader=grader)
        text, remarks = export.exported(LAB, tmp_path / "out", table)
        return [row["Grade"] for row in csv.DictReader(io.StringIO(text))], remarks

    points, remarks = run()
    assert points == ["15", "", "", ""]
    assert remarks == [
        "nothing was written for Marie: it was cut off",
        "nothing was written for Lise: Moodle has locked this grade (15 points here)",
        "nothing was written for Emmy: there is no submission here",
    ]
    (tmp_path / "out" / "overrides.csv").write_text("student,exercise,points,comment\nMarie_2,0.1,1,on paper\n")
    assert run()[0] == ["15", "1", "", ""]


def test_a_lab_is_named_by_its_number_or_in_full():
    assert [export.lab_named(text) for text in ("2", "02", "02_manual_ddp", "77")] == [*["02_manual_ddp"] * 3, "77"]


def test_a_maximum_that_differs_is_reported(tmp_path, monkeypatch):
    """Moodle's usual maximum is 100: a student with all points once got 15% without a word."""
    graded_from(tmp_path, monkeypatch, "Moodle")
    table = tmp_path / "export.csv"
    for platform, change, remarks in (
        (
            "Canvas",
            (",15\n", ",100.00\n"),
            ["the maximum is 100 in export.csv and 15 here, and points are not scaled", WITHOUT_POINTS],
        ),
        (
            "Moodle",
            ("15.00", "12,00"),
            [
                "the maximum is 12 in export.csv and 15 here, and points are not scaled",
                "Moodle may not accept points above its maximum of 12: Ada Lovelace_12345; Marie Curie_12346",
            ],
        ),
    ):
        quoted = change[1].replace("12,00", '"12,00"')
        table.write_text(TABLES[platform].replace(change[0], quoted))
        assert export.exported(LAB, tmp_path / "out", table)[1] == remarks
    table.write_text("Identifier,Grade,Maximum Grade\nParticipant 12346,,12\n")
    assert export.exported(LAB, tmp_path / "out", table)[1][1:] == [
        "Moodle may not accept points above its maximum of 12: Marie Curie_12346",
        "Ada Lovelace_12345 is not in export.csv",
    ]


def test_two_students_with_one_number_get_nobodys_points(tmp_path, monkeypatch):
    files = ZIPS["Moodle"] | {"Other Ada_12345_assignsubmission_file/00_ranks_lab.ipynb": NOTEBOOK}
    monkeypatch.setitem(ZIPS, "Moodle", files)
    graded_from(tmp_path, monkeypatch, "Moodle")
    table = tmp_path / "export.csv"
    table.write_text(TABLES["Moodle"])
    with pytest.raises(export.NoMatch, match="Ada Lovelace_12345 and Other Ada_12345 end with the same number"):
        export.exported(LAB, tmp_path / "out", table)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a,b\n1,2\n", "neither the columns of Canvas"),
        ("Student,ID,other\n", "0 columns contain '00_ranks'"),
        ("Identifier,Grade\nParticipant 1,\n", "no student of 00_ranks"),
    ],
)
def test_a_table_without_these_students_is_rejected(tmp_path, monkeypatch, text, message):
    graded_from(tmp_path, monkeypatch, "Moodle")
    table = tmp_path / "export.csv"
    table.write_text(text)
    with pytest.raises(export.NoMatch, match=message):
        export.exported(LAB, tmp_path / "out", table)


UPLOADED = """---
submission_200:
  :submitters:
  - :name: Eve
    :email: eve@x.org
  :created_at: 2026-12-09 22:00:00 +0100
submission_300:
  :submitters:
  - :name: Ada
    :email: ada@x.org
  :created_at: 2026-12-01 22:00:00 +0100
"""


def test_a_folder_that_eve_uploads_to_gradescope_cannot_replace_the_work_of_ada(tmp_path):
    """Students can upload folders to Gradescope. The grader must not read their names as Moodle's."""
    files = {
        "assignment_9_export/submission_metadata.yml": UPLOADED,
        "assignment_9_export/submission_300/00_ranks_lab.ipynb": "ada's",
        "assignment_9_export/submission_200/00_ranks_lab.ipynb": "eve's",
        "assignment_9_export/submission_400/Ada_300_assignsubmission_file_/00_ranks_lab.ipynb": "eve's",
    }
    lms_zips.unpack(packed(tmp_path, files), tmp_path / "in")
    assert (tmp_path / "in/Ada_300/00_ranks/00_ranks.ipynb").read_text() == "ada's"


def test_metadata_that_eve_uploads_to_gradescope_does_not_count(tmp_path):
    """In the zip file, the files in submission_200 come before Gradescope's own submission_metadata.yml."""
    files = {
        "assignment_9_export/submission_200/00_ranks_lab.ipynb": "eve's",
        "assignment_9_export/submission_200/submission_metadata.yml": UPLOADED.replace("12-09", "11-01"),
        "assignment_9_export/submission_300/00_ranks_lab.ipynb": "ada's",
        "assignment_9_export/submission_metadata.yml": UPLOADED,
    }
    lms_zips.unpack(packed(tmp_path, files), tmp_path / "in")
    assert "2026-12-09" in (tmp_path / "in/Eve_200/00_ranks/timestamp.txt").read_text()


LESSON = (ROOT / "chapters" / f"{LAB}.ipynb").read_text(encoding="utf-8")
CLASS = {
    f"obrienniamh_41005_900005_{LAB}_lab.ipynb": NOTEBOOK,
    f"lovelaceada_LATE_41001_900001_{LAB}_lab.ipynb": NOTEBOOK,
    f"curiemarie_41002_900002_{LAB}.ipynb": LESSON,
    f"curiemarie_41002_900003_{LAB}_lab-1.ipynb": NOTEBOOK,
    "noetheremmy_41003_900004_report.pdf": "%PDF",
}
MOODLE = {f"Ada Lovelace_41001_assignsubmission_file/{LAB}_lab.ipynb": NOTEBOOK}
NAMES = 'Student,ID\n"O\'Brien, Niamh",41005\n"Lovelace, Ada",41001\n'


def with_code(submission, course, limits):
    """Grade without a sandbox, and keep the code of all exercises."""
    record = instant(submission, course, limits)
    code = "\n".join(f"value_{n} = compute({n}) + other({n}) ** {n}" for n in range(40))
    cells = [name for task in course.tasks for name in task.cells]
    answers = [replace(answer, cells=cells[:1]) for answer in record.answers]
    missing = "there is no notebook" if submission.path is None else ""
    return replace(record, answers=answers, code=dict.fromkeys(cells, code), reason=missing)


@pytest.fixture
def graded(tmp_path, monkeypatch):
    monkeypatch.setattr(sandbox, "require", lambda: None)
    lms_zips.unpack(packed(tmp_path, CLASS), tmp_path / "in")
    (tmp_path / "in" / "gradebook.csv").write_text(NAMES, encoding="utf-8")
    (tmp_path / "in" / "course.toml").write_text('names = "gradebook.csv"\n', encoding="utf-8")
    grade.grade_all(tmp_path / "in", tmp_path / "out", grader=with_code)
    return {row["student"]: row for row in rows(tmp_path / "out" / "gradebook.csv")}


def test_what_the_platform_says_stays_visible(graded, tmp_path):
    index = (tmp_path / "out" / "index.html").read_text(encoding="utf-8")
    assert "Canvas marks this as late" in graded["lovelaceada_41001"]["look_at"] and "marks this as late" in index
    assert "late" not in graded["obrienniamh_41005"]["look_at"]
    page = (tmp_path / "out" / graded["obrienniamh_41005"]["feedback"]).read_text(encoding="utf-8")
    assert graded["obrienniamh_41005"]["name"] == "O'Brien, Niamh"
    assert all("O&#39;Brien, Niamh" in text and "obrienniamh" not in text.split("<body>")[1] for text in (page,))
    assert "O&#39;Brien, Niamh</a>" in index and "curiemarie_41002</a>" in index  # who is not in the table


def test_the_choice_among_several_notebooks_is_on_the_page_and_in_the_index(graded, tmp_path):
    row = graded["curiemarie_41002"]
    sentence = f"{LAB}_lab-1.ipynb is graded, and this is not: {LAB}.ipynb (the lesson)."
    assert sentence in row["look_at"]
    assert sentence in (tmp_path / "out" / row["feedback"]).read_text(encoding="utf-8")


def test_copies_are_marked_in_the_index(graded, tmp_path):
    notice = "is the same as that of"
    assert notice in graded["lovelaceada_41001"]["look_at"] and notice in graded["obrienniamh_41005"]["look_at"]
    assert "curiemarie_41002; O'Brien, Niamh" in graded["lovelaceada_41001"]["look_at"]
    assert notice not in graded["noetheremmy_41003"]["look_at"]
    assert "whose code is alike" in (tmp_path / "out" / "index.html").read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("files", "names"),
    [
        (
            CLASS,
            [
                f"curiemarie_41002_900003_{LAB}.html",
                f"lovelaceada_LATE_41001_900001_{LAB}.html",
                f"obrienniamh_41005_900005_{LAB}.html",
            ],
        ),
        (MOODLE, [f"Ada Lovelace_41001_assignsubmission_file_{LAB}.html"]),
        ({f"team_7_41001_900001_{LAB}_lab.ipynb": NOTEBOOK}, [f"team_7_41001_900001_{LAB}.html"]),
        ({f"submission_77/{LAB}_lab.ipynb": NOTEBOOK}, []),
    ],
)
def test_feedback_is_packed_as_the_platform_expects_it(tmp_path, monkeypatch, files, names):
    monkeypatch.setattr(sandbox, "require", lambda: None)
    lms_zips.unpack(packed(tmp_path, files), tmp_path / "in")
    grade.grade_all(tmp_path / "in", tmp_path / "out", grader=instant)
    pages, remarks = returns.packed(LAB, tmp_path / "in", tmp_path / "out")
    with zipfile.ZipFile(io.BytesIO(as_zip(pages))) as archive:
        assert archive.namelist() == names
    assert len(remarks) == (1 if files is CLASS or not names else 0)


def test_the_time_that_is_left_is_estimated():
    assert [grade._left(90, 3, total) for total in (3, 4, 13)] == ["", ", about 30 s left", ", about 5 min left"]
    assert grade._left(60, 2, 100) == "", "the first ones are the quick ones"


@pytest.mark.parametrize("what", ["zip", "canvas", "moodle", "gradescope"])
def test_whoever_grades_a_download_is_told_to_sort_it(tmp_path, what):
    path = packed(tmp_path, CLASS)
    if what != "zip":
        names = {"canvas": next(iter(CLASS)), "moodle": next(iter(MOODLE)), "gradescope": f"submission_7/{LAB}.ipynb"}
        path = tmp_path / what
        (path / names[what]).parent.mkdir(parents=True)
        (path / names[what]).write_text(NOTEBOOK, encoding="utf-8")
    with pytest.raises(grade.Usage, match=r"is a platform's download; sort it into folders first: python -m"):
        grade.grade_all(path, tmp_path / "out")
