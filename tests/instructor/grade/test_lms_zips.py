"""Of what students hand in, the lab that they worked on is graded, and nobody is lost."""

import struct
import unicodedata
import zipfile

import nbformat
import pytest

from instructor import build
from instructor.build import ROOT
from instructor.grade import choice, export, finding, lms_zips, platforms
from instructor.grade.choice import Notebook
from tests.handed_in import CHAPTERS, packed

LAB = "00_ranks"
CHAPTER = CHAPTERS[LAB]


def as_text(notebook) -> str:
    return nbformat.writes(notebook)


def lab(edited: int = 0) -> str:
    """Return the lab as it was handed out, with some edited exercises."""
    notebook = build.lab_of(CHAPTER)
    exercises = [cell for cell in notebook.cells if "exercise" in cell.metadata.get("tags", [])]
    for cell in exercises[:edited]:
        cell.source += "\n# mine"
    return as_text(notebook)


UNTOUCHED, WORKED, FINISHED = lab(), lab(1), lab(2)
OTHER = as_text(build.lab_of(CHAPTERS["01_collectives"]))
LESSON = (ROOT / "chapters" / f"{LAB}.ipynb").read_text(encoding="utf-8")
SOLUTION = (ROOT / "solutions" / f"{LAB}_solution.ipynb").read_text(encoding="utf-8")
LONELY_CELL = nbformat.reads(UNTOUCHED, as_version=4)
LONELY_CELL.cells.append(nbformat.v4.new_code_cell("%%ranks\ndef sum_over_ranks(x): ..."))
NAMED = f"{LAB}_lab.ipynb"


@pytest.mark.parametrize(
    ("files", "chosen"),
    [
        ({f"chapters/{LAB}.ipynb": LESSON, f"labs/{NAMED}": WORKED}, f"labs/{NAMED}"),
        ({f"{LAB}.ipynb": LESSON, NAMED: UNTOUCHED}, NAMED),
        ({NAMED: WORKED, f"{LAB}_lab (1).ipynb": UNTOUCHED}, NAMED),
        ({NAMED: UNTOUCHED, f"{LAB}_lab-Copy1.ipynb": WORKED}, f"{LAB}_lab-Copy1.ipynb"),
        ({f"solutions/{LAB}_solution.ipynb": SOLUTION, f"labs/{NAMED}": UNTOUCHED}, f"labs/{NAMED}"),
        ({f"solutions/{LAB}_solution.ipynb": SOLUTION}, None),
        ({f"{LAB}.ipynb": LESSON}, None),
        ({f"{LAB}_solution.ipynb": WORKED}, f"{LAB}_solution.ipynb"),  # "my solution"
        ({"homework.ipynb": WORKED, NAMED: UNTOUCHED}, "homework.ipynb"),
        ({"homework.ipynb": FINISHED, NAMED: WORKED}, NAMED),
        ({f"{LAB}_lab (1).ipynb": WORKED, f"{LAB}_lab (2).ipynb": WORKED + " "}, f"{LAB}_lab (2).ipynb"),
        ({f"{LAB}_lab (1).ipynb": FINISHED, f"{LAB}_lab (2).ipynb": WORKED}, f"{LAB}_lab (1).ipynb"),
        ({NAMED: '{"cells": [', f"{LAB}_lab (1).ipynb": UNTOUCHED}, NAMED),  # cut off, which its author should know
        ({NAMED: as_text(LONELY_CELL), f"{LAB}_lab (1).ipynb": UNTOUCHED}, NAMED),
    ],
)
def test_the_lab_that_was_worked_on_is_chosen_whatever_is_beside_it(tmp_path, files, chosen):
    notebooks = [Notebook(name, text.encode()) for name, text in files.items()]
    for handed_in in (notebooks, notebooks[::-1]):
        best = choice.choose(handed_in, CHAPTER)
        assert (best.notebook.name if best.notebook else None) == chosen
        assert [name in best.sentence for name in files] == [bool(chosen) and len(files) > 1] * len(files)
    for folder in ("ada", f"ada/{LAB}"):  # as Gradescope or nbgrader lay them out
        for name, text in files.items():
            path = tmp_path / folder / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")
        (found,) = finding.find(tmp_path, LAB)
        assert (found.path.name if found.path else None) == (chosen.split("/")[-1] if chosen else None)
        (found.path or tmp_path / "x").unlink(missing_ok=True)


def test_the_newest_of_two_that_were_worked_on_is_chosen():
    old, new = Notebook(NAMED, FINISHED.encode(), 1e6), Notebook(f"{LAB}_lab (1).ipynb", WORKED.encode(), 2e6)
    best = choice.choose([new, old], CHAPTER)
    assert best.notebook is new
    assert best.sentence == f"{LAB}_lab (1).ipynb is graded, and this is not: {NAMED} (older)."


def test_a_lab_in_a_folder_of_its_own_makes_no_other_lab_graded(tmp_path):
    """A student who uploads the whole bundle also hands in labs of other weeks, as they were handed out."""
    for name, text in (
        (NAMED, WORKED),
        ("01_collectives_lab.ipynb", as_text(build.lab_of(CHAPTERS["01_collectives"]))),
    ):
        (tmp_path / "ada" / "labs").mkdir(parents=True, exist_ok=True)
        (tmp_path / "ada" / "labs" / name).write_text(text, encoding="utf-8")
    assert [chapter.name for chapter in finding.labs_in(tmp_path)] == [LAB]


def test_hidden_files_checkpoints_and_links_are_not_handed_in(tmp_path):
    folder = tmp_path / "ada" / LAB
    for name in (f".ipynb_checkpoints/{LAB}_lab-checkpoint.ipynb", f"._{NAMED}", f"__MACOSX/._{NAMED}"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(WORKED, encoding="utf-8")
    (folder / "elsewhere").symlink_to(ROOT / "labs")
    assert finding.find(tmp_path, LAB)[0].path is None
    (folder / "deep" / "labs").mkdir(parents=True)
    (folder / "deep" / "labs" / "mine.ipynb").write_text(WORKED, encoding="utf-8")
    assert finding.find(tmp_path, LAB)[0].path == folder / "deep" / "labs" / "mine.ipynb"


def unpacked(tmp_path, files, chapter=None) -> tuple[dict[str, str], list[str]]:
    """Return what each student's notebooks contain, by student and lab, and the remarks but those about times."""
    written, remarks = lms_zips.unpack(packed(tmp_path, files), tmp_path / "in", chapter)
    names = {path: f"{path.parent.parent.name}/{path.parent.name}" for path in written}
    return {names[path]: path.read_text(encoding="utf-8") for path in written}, remarks


BUNDLE = {
    f"submission_77/b/chapters/{LAB}.ipynb": LESSON,
    f"submission_77/b/labs/{NAMED}": WORKED,
    f"submission_77/b/solutions/{LAB}_solution.ipynb": SOLUTION,
    "submission_77/b/labs/01_collectives_lab.ipynb": OTHER,
}


@pytest.mark.parametrize("chapter", [None, CHAPTER], ids=["any lab", "one lab"])
def test_from_a_whole_bundle_only_the_students_own_lab_is_taken(tmp_path, chapter):
    found, remarks = unpacked(tmp_path, BUNDLE, chapter)
    assert found == {f"student_77/{LAB}": WORKED}
    assert "b/labs/00_ranks_lab.ipynb is graded" in remarks[0] and "the lesson" in remarks[0]
    assert ["as it was handed out" in remark for remark in remarks[1:]] == ([True] if chapter is None else [])


def test_an_untouched_lab_replaces_nobodys_work(tmp_path):
    name = f"ada_1_11_{NAMED}"
    assert unpacked(tmp_path, {name: WORKED})[0] == {f"ada_1/{LAB}": WORKED}
    assert unpacked(tmp_path, {name: UNTOUCHED}) == ({}, [f"{name} was left out, because it is as it was handed out"])
    assert unpacked(tmp_path, {name: FINISHED})[0] == {f"ada_1/{LAB}": FINISHED}
    assert unpacked(tmp_path, {f"ben_2_12_{NAMED}": UNTOUCHED})[0] == {f"ben_2/{LAB}": UNTOUCHED}


def test_a_notebook_in_a_students_own_zip_file_and_one_with_another_name_are_found(tmp_path):
    inner = packed(tmp_path, {f"b/chapters/{LAB}.ipynb": LESSON, f"b/labs/{NAMED}": WORKED}).read_bytes()
    files = {"ada_1_11_all.zip": inner, "ben_2_12_homework.ipynb": WORKED, "cleo_3_13_photos.zip": b"PK"}
    found, remarks = unpacked(tmp_path, files)
    assert found == {f"ada_1/{LAB}": WORKED, f"ben_2/{LAB}": WORKED}
    assert remarks[-1] == "cleo_3 handed in no notebook, but cleo_3_13_photos.zip"


@pytest.mark.parametrize(
    ("name", "student", "late"),
    [
        (f"lovelaceada_12345_678901_{NAMED}", "lovelaceada_12345", False),
        (f"lovelaceada_LATE_12345_678901_{NAMED}", "lovelaceada_12345", True),
        (f"team_7_41001_900001_{NAMED}", "team_7_41001", False),
        (f"team_7_LATE_41001_900001_{NAMED}", "team_7_41001", True),
        ("team_7_41001_900001_3_report.pdf", "team_7_41001", False),
        ("ada_1_11_10_fsdp_lab.ipynb", "ada_1", False),
        (f"anon_ab3Kx_900001_{NAMED}", "anonymous ab3Kx", False),
        (f"LATE_anon_12345_900002_{NAMED}", "anonymous 12345", True),
        (f"Ada Lovelace_12345_assignsubmission_file/{NAMED}", "Ada Lovelace_12345", False),
        (f"Ada Lovelace_12345_assignsubmission_file_/sub/{NAMED}", "Ada Lovelace_12345", False),
        (f"Ada Lovelace_12345_assignsubmission_file_{NAMED}", "Ada Lovelace_12345", False),
        (f"Team A-Participant_12345_assignsubmission_file_{NAMED}", "Team A-Participant_12345", False),
        (f"Class 2/Ada_12345_assignsubmission_file_/{NAMED}", "Ada_12345", False),
    ],
)
def test_a_platforms_names_say_who_it_was(tmp_path, name, student, late):
    written, _ = lms_zips.unpack(packed(tmp_path, {name: "x"}), tmp_path / "in")
    assert [path.name for path in (tmp_path / "in").iterdir()] == [student]
    if written:
        (found,) = finding.find(tmp_path / "in", written[0].stem)
        assert finding.note_of(found).late == late
    assert export._number_of(student) == (student if student.startswith("anonymous") else student.split("_")[-1])


@pytest.mark.parametrize(
    ("name", "folder"),
    [
        (unicodedata.normalize("NFD", "José Núñez"), "José Núñez"),
        ("प्रिया शर्मा", "प्रिया शर्मा"),
        ("นภา ใจดี", "นภา ใจดี"),
        ("محمّد", "محمّد"),
        ("Nguyễn Thị Hồng", "Nguyễn Thị Hồng"),
        ("王小明", "王小明"),
        ("Ολγα", "Ολγα"),
        ("..", "student"),
        ("語" * 90, "語" * 50),  # A file system allows 255 bytes.
    ],
)
@pytest.mark.parametrize("flagged", [True, False])
def test_names_keep_their_letters_in_every_script(tmp_path, name, folder, flagged):
    path = tmp_path / "download.zip"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr(f"{name}_1_assignsubmission_file/{NAMED}", WORKED)
    if not flagged:  # Some programs write UTF-8 without saying so.
        data = path.read_bytes()
        for header, at in ((b"PK\x03\x04", 6), (b"PK\x01\x02", 8)):
            start = data.find(header)
            data = data[: start + at] + b"\0\0" + data[start + at + 2 :]
        path.write_bytes(data)
    lms_zips.unpack(path, tmp_path / "in")
    assert [each.name for each in (tmp_path / "in").iterdir()] == [f"{folder}_1"]


def patched(path, at_local: int, at_central: int, change: bytes) -> None:
    """Change two bytes in both headers of the second of several members."""
    data = bytearray(path.read_bytes())
    local = data.find(b"PK\x03\x04", 4)
    central = data.find(b"PK\x01\x02", data.find(b"PK\x01\x02") + 4)
    data[local + at_local : local + at_local + 2] = data[central + at_central : central + at_central + 2] = change
    path.write_bytes(data)


@pytest.mark.parametrize(
    ("damage", "why"),
    [
        (lambda path: patched(path, 8, 10, struct.pack("<H", 9)), "is compressed with method 9"),
        (lambda path: patched(path, 6, 8, struct.pack("<H", 1)), "is encrypted: unpack the zip file with another"),
        (lambda path: patched(path, 14, 16, b"\0\0"), "is damaged: download the zip file again"),
        (lambda path: patched(path, 24, 26, b"\xff\x7f"), "is larger than 20 MB"),
    ],
    ids=["another method", "a password", "a wrong checksum", "a huge size"],
)
def test_a_member_that_cannot_be_read_costs_nobody_else_anything(tmp_path, damage, why):
    path = packed(tmp_path, {f"{name}_{n}_1{n}_{NAMED}": WORKED for n, name in enumerate(("ada", "ben", "cleo"), 1)})
    damage(path)
    written, remarks = lms_zips.unpack(path, tmp_path / "in")
    assert [each.parent.parent.name for each in written] == ["ada_1", "cleo_3"]
    assert sorted(each.name for each in (tmp_path / "in").iterdir()) == ["ada_1", "ben_2", "cleo_3"]
    (about_ben,) = [remark for remark in remarks if "ben" in remark]
    assert why in about_ben


@pytest.mark.parametrize("metadata", ["two", "none", "broken"])
def test_everybody_in_a_group_gets_a_folder(tmp_path, metadata):
    people = "  :submitters:\n  - :name: Ada\n  - :name: Marie\n  - 7\n  :created_at: 2026-11-30 12:00:00 Z\n"
    texts = {"two": f"submission_77:\n{people}", "none": "submission_77: {}", "broken": "a: [b\n: !ruby/x"}
    files = {f"e/submission_77/{NAMED}": WORKED, "e/submission_metadata.yml": texts[metadata]}
    found, remarks = unpacked(tmp_path, files)
    names = ["Ada", "Marie"] if metadata == "two" else ["student"]
    assert found == {f"{name}_77/{LAB}": WORKED for name in names}
    assert ["names are unknown" in remark for remark in remarks] == [True] * (metadata == "broken")


def test_a_download_that_a_browser_has_unpacked_is_sorted_as_well(tmp_path):
    files = {
        "canvas": {f"lovelaceada_LATE_12345_678901_{NAMED}": WORKED},
        "moodle": {f"Ada_12345_assignsubmission_file/{NAMED}": WORKED},
        "gradescope": {f"submission_77/labs/{NAMED}": WORKED, "submission_metadata.yml": "submission_77: {}"},
    }
    for platform, own in files.items():
        with zipfile.ZipFile(packed(tmp_path, own)) as archive:
            archive.extractall(tmp_path / platform)
        assert platforms.looks_like_a_download(tmp_path / platform)
        written, _ = lms_zips.unpack(tmp_path / platform, tmp_path / f"in-{platform}")
        assert [path.read_text(encoding="utf-8") for path in written] == [WORKED]
        assert not platforms.looks_like_a_download(tmp_path / f"in-{platform}")
    with pytest.raises(lms_zips.NotAnArchive, match="has no file that is named as"):
        lms_zips.unpack(ROOT / "labs", tmp_path / "in")


def test_of_two_exercises_with_one_name_the_lab_with_more_of_them_is_meant():
    for name, chapter in CHAPTERS.items():
        assert choice.lab_in(as_text(build.solution_of(chapter)).encode()).name == name
    assert choice.lab_in(LESSON.encode()) is None
