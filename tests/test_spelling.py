"""The spelling check finds misspelled words in prose, and ignores code, formulas and names."""

import pytest

from tests import spelling

PLANTED = ["recieve", "shrad", "gradeint", "teh", "occured", "bukcet", "synchronzie"]


def found(path, known=()) -> list[str]:
    return [line.removeprefix(f"{path}:") for line in spelling.misspelled([path], known)]


@pytest.mark.parametrize("word", PLANTED)
@pytest.mark.parametrize(
    "prose",
    ["# A {} here", 'def f():\n    """Say {} twice."""', "raise ValueError('this rank has {}, and no other')"],
    ids=["comment", "docstring", "message"],
)
def test_a_misspelling_is_found_in_python(tmp_path, word, prose):
    path = tmp_path / "lesson.py"
    path.write_text(f"import os\n\n{prose.format(word)}\n")
    (line,) = found(path)
    assert line.split(" (")[0] == f"{4 if 'def' in prose else 3}: {word}"


def test_a_misspelling_is_found_in_markdown_unless_the_word_is_known(tmp_path):
    path = tmp_path / "README.md"
    path.write_text(
        "# Title\n\n```\nshrad\n```\nThe **shrad** of `shrad`, $shrad$, shrad.py and shrad_bytes; half-shrad.\n"
    )
    assert [line.split(" (")[0] for line in found(path)] == ["6: shrad", "6: shrad"]
    assert found(path, known=["shrad"]) == []


def test_code_is_not_prose(tmp_path):
    path = tmp_path / "code.py"
    path.write_text("recieve = 'shrad'  # `gradeint` and fp32, DDP and x.shrad\n# %% shrad\n")
    assert found(path) == []


def test_the_known_words_are_sorted_and_contain_no_mistake():
    own = spelling.WORDS.read_text().split()
    assert own == sorted(set(own)) and not set(own) & set(PLANTED)


def test_an_unknown_word_fails_the_command(monkeypatch, tmp_path, capsys):
    (tmp_path / "notes.md").write_text("A gradeint.")
    monkeypatch.setattr(spelling, "prose_files", lambda: [tmp_path / "notes.md"])
    assert spelling.main() == 1
    assert "notes.md:1: gradeint" in capsys.readouterr().out
