"""Tables are read as people's programs write them, and nothing in them is overwritten without a word."""

import csv
import io

import pytest

from instructor.grade import export, policy, tables

LAB = "00_ranks"
OURS = [("Ada Lovelace_41001", "12.5", "yes"), ("Jürgen Müller_41002", "9", "yes"), ("Marie Curie_41003", "0", "no")]
CANVAS = [
    ["Student", "ID", "SIS User ID", "SIS Login ID", "Section", f"{LAB} (99)", "Final Score"],
    ["    Points Possible", "", "", "", "", "15", "(read only)"],
    ["Lovelace, Ada", "41001", "7", "ada", "1", "", ""],
    ["Müller, Jürgen", "41002", "8", "jm", "1", "", ""],
    ["Curie, Marie", "41003", "9", "marie", "1", "", ""],
]
MOODLE = [
    ["Identifier", "Full name", "Email address", "Status", "Grade", "Maximum Grade", "Grade can be changed"],
    ["Participant 41001", "Ada Lovelace", "ada@x.org", "Submitted", "", "15.00", "Yes"],
    ["Participant 41002", "Jürgen Müller", "jm@x.org", "Submitted", "", "15.00", "Yes"],
    ["Participant 41003", "Marie Curie", "marie@x.org", "Submitted", "", "15.00", "Yes"],
]
GERMAN = [
    ["ID", "Vollständiger Name", "Status", "Bewertung", "Bestwertung", "Bewertung kann geändert werden", "Zuletzt"],
    ["Teilnehmer/in41001", "Ada Lovelace", "Abgegeben", "", "15,00", "Ja", "heute"],
    ["Teilnehmer/in41002", "Jürgen Müller", "Abgegeben", "", "15,00", "Ja", "heute"],
    ["Teilnehmer/in41003", "Marie Curie", "Abgegeben", "", "15,00", "Ja", "heute"],
]
FRENCH = [["Étudiant", "ID", "Identifiant SIS", "Section", f"{LAB} (99)"], *([*r[:3], r[4], r[5]] for r in CANVAS[1:])]
ENCODINGS = ["utf-8", "utf-8-sig", "cp1252", "utf-16", "utf-16-le"]


@pytest.fixture
def grades(tmp_path):
    folder = tmp_path / "grades"
    folder.mkdir()
    header = "student,lab,points,max_points,reason,look_at,feedback,graded,name"
    lines = [f"{student},{LAB},{points},15,because,,,{graded}," for student, points, graded in OURS]
    (folder / "gradebook.csv").write_text("\n".join([header, *lines]) + "\n", encoding="utf-8-sig")
    return folder


def saved(folder, rows, encoding="utf-8", separator=",", line_end="\r\n", first=""):
    text = io.StringIO()
    csv.writer(text, delimiter=separator, lineterminator=line_end).writerows(rows)
    path = folder / "export.csv"
    path.write_bytes((first + text.getvalue()).encode(encoding))
    return path


def points_in(text: str, column: int, separator: str = ",") -> list[str]:
    rows = csv.reader(io.StringIO(text.removeprefix(tables.BYTE_ORDER_MARK)), delimiter=separator)
    return [row[column] for row in list(rows)[1:]]


@pytest.mark.parametrize("separator", [",", ";", "\t"])
@pytest.mark.parametrize("encoding", ENCODINGS)
@pytest.mark.parametrize(("rows", "column"), [(CANVAS, 5), (MOODLE, 4), (GERMAN, 3), (FRENCH, 4)])
def test_points_are_written_whatever_program_and_language_saved_the_table(grades, rows, column, encoding, separator):
    path = saved(grades, rows, encoding, separator)
    text, remarks = export.exported(LAB, grades, path)
    assert points_in(text, column, separator)[-3:] == ["12.5", "9", ""]
    assert text.startswith(tables.BYTE_ORDER_MARK) == (encoding != "utf-8")
    rest = [[cell for at, cell in enumerate(row) if at != column] for row in tables.read(path).rows]
    assert rest == [[cell for at, cell in enumerate(row) if at != column] for row in rows[1:]]
    marie = rows[-1][0 if rows in (CANVAS, FRENCH) else 1]
    assert remarks == [f"nothing was written for {marie}: because"]


@pytest.mark.parametrize("line_end", ["\n", "\r\n", "\r"])
@pytest.mark.parametrize("first", ["", "sep=;\r\n"])
def test_a_table_is_read_with_every_line_end_and_excels_first_line(grades, line_end, first):
    path = saved(grades, CANVAS, separator=";", line_end=line_end, first=first)
    assert points_in(export.exported(LAB, grades, path)[0], 5, ";") == ["15", "12.5", "9", ""]


def test_what_is_in_the_table_is_not_overwritten_without_a_word(grades):
    before = ["", "EX", "9.0", "7"]
    for rows, column in ((CANVAS, 5), (MOODLE, 4)):
        changed = [list(row) for row in rows]
        for row, text in zip(changed[-3:], before[1:], strict=True):
            row[column] = text
        text, remarks = export.exported(LAB, grades, saved(grades, changed))
        assert points_in(text, column)[-3:] == ["EX", "9", "7"]
        ada, marie = rows[-3][rows is MOODLE], rows[-1][rows is MOODLE]
        expected = [f"{ada}: the cell contains 'EX' (12.5 points here)", f"{marie}: because"]
        assert remarks == [f"nothing was written for {each}" for each in expected]
    changed[-2][4] = "7,5"
    _, remarks = export.exported(LAB, grades, saved(grades, changed))
    assert "Jürgen Müller had 7,5 points and now has 9" in remarks


def test_a_locked_grade_is_kept_in_other_languages(grades):
    rows = [list(row) for row in GERMAN]
    rows[1][5] = "Nein"
    text, remarks = export.exported(LAB, grades, saved(grades, rows))
    assert points_in(text, 3) == ["", "9", ""]
    assert remarks[0] == "nothing was written for Ada Lovelace: Moodle has locked this grade (12.5 points here)"


@pytest.mark.parametrize(
    "data",
    [
        b"PK\x03\x04 an xlsx file",
        b"\xd0\xcf\x11\xe0 an xls file",
        "Студент,ID\nИванов,41001\n".encode("cp1251"),
        "氏名,ID\n山田太郎,41001\n".encode("shift_jis"),
        b'Student,ID\n"' + b"x" * 200_000,
    ],
    ids=["xlsx", "xls", "cp1251", "shift_jis", "endless cell"],
)
def test_a_table_that_cannot_be_read_is_rejected_with_one_advice(tmp_path, data):
    path = tmp_path / "table.csv"
    path.write_bytes(data)
    with pytest.raises(tables.Unreadable, match=r"table\.csv cannot be read as a table \(.*\): save it as “CSV UTF-8”"):
        tables.read(path)


@pytest.mark.parametrize("encoding", ENCODINGS)
@pytest.mark.parametrize("separator", [",", ";"])
def test_decisions_are_read_as_excel_saves_them(tmp_path, encoding, separator):
    rows = [["student", "exercise", "points", "comment"], ["José_1", "0.2", "1,5", "für die Mühe"]]
    decided = policy.load(tmp_path / "no.toml", saved(tmp_path, rows, encoding, separator)).overrides
    assert decided == {("José_1", "0.2"): policy.Override(1.5, "für die Mühe")}


def test_files_that_editors_mark_are_read(tmp_path):
    course = tmp_path / "course.toml"
    course.write_text('names = "names.csv"\n[late]\ndays = 3\n', encoding="utf-8-sig")
    saved(tmp_path, CANVAS, "cp1252", ";").rename(tmp_path / "names.csv")
    loaded = policy.load(course, tmp_path / "none.csv", ["Ada Lovelace_41001", "muellerjuergen_41002", "x_5"])
    assert loaded.late.days == 3
    assert loaded.names == {"Ada Lovelace_41001": "Lovelace, Ada", "muellerjuergen_41002": "Müller, Jürgen"}
    (tmp_path / "names.csv").write_bytes(b"PK\x03\x04")
    with pytest.raises(policy.Mistake, match=r"names: names\.csv cannot be read as a table"):
        policy.load(course, tmp_path / "none.csv", ["x_5"])
