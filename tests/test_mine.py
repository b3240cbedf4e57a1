"""A student's own pieces are saved when their checks pass, and later labs can import them."""

import os
import sys

import pytest

from shared import mine
from shared.ranks.definitions import Definitions

LAB = (
    "import torch\nimport torch.distributed as dist\nfrom torch import nn\n\nSCALE = 2\n",
    "def helper(x):\n    return x * SCALE  # twice\n\n\ndef unused(x):\n    return x",
    "@torch.no_grad()\ndef double(x):\n    return helper(x)",
)


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setattr(mine, "ROOT", tmp_path)
    yield tmp_path / "mine"
    for name in [name for name in sys.modules if name.startswith("mine.")]:
        del sys.modules[name]


def cells_of(*sources: str) -> list:
    definitions = Definitions()
    for source in sources:
        definitions.remember(source, None)
    return definitions.cells


def test_a_piece_is_saved_with_what_it_uses_and_imported(folder):
    mine.save("doubling", "double", cells_of(*LAB))
    from shared.mine import double

    assert double(3) == 6
    text = (folder / "doubling.py").read_text()
    assert "# twice" in text and "@torch.no_grad()" in text, "the source is the student's"
    assert "unused" not in text and "nn" not in text.split(), "only what the piece uses"


def test_a_better_version_replaces_the_earlier_one_and_other_pieces_stay(folder):
    mine.save("doubling", "double", cells_of(*LAB))
    better = ("def helper(x):\n    return x + x", "def quadruple(x):\n    return helper(helper(x))")
    mine.save("doubling", "quadruple", cells_of(*LAB, *better))
    text = (folder / "doubling.py").read_text()
    assert text.count("def helper") == 1 and text.index("def helper") < text.index("def double")
    from shared.mine import double, quadruple

    assert (double(3), quadruple(3)) == (6, 12)


def test_a_class_in_two_cells_is_saved_whole(folder):
    cells = "class Ring:\n    size = 4", "class Ring(Ring):\n    def step(self):\n        return self.size"
    mine.save("rings", "Ring", cells_of(*cells))
    mine.save("rings", "Ring", cells_of(*cells))
    assert (folder / "rings.py").read_text().count("class Ring") == 2
    assert mine.Ring().step() == 4


def test_the_newest_of_two_labs_counts(folder):
    mine.save("first", "piece", cells_of("def piece():\n    return 1"))
    mine.save("second", "piece", cells_of("def piece():\n    return 2"))
    os.utime(folder / "first.py", (1, 1))
    assert mine.piece() == 2


def test_a_piece_that_uses_the_notebooks_variables_is_not_saved(folder):
    with pytest.raises(
        mine.NotSaved, match=r"it uses rank, which exists only in %%ranks cells; dist.get_rank\(\) works"
    ):
        mine.save("bad", "piece", cells_of("def piece():\n    return rank"))
    with pytest.raises(mine.NotSaved, match="no cell defines piece"):
        mine.save("bad", "piece", cells_of("x = 1"))
    assert not folder.exists()


def test_a_parameter_or_a_variable_named_rank_is_allowed(folder):
    mine.save("good", "piece", cells_of("def piece():\n    rank = 3\n    return rank"))
    mine.save("good", "other", cells_of("def other(device):\n    return device"))
    assert (mine.piece(), mine.other(2)) == (3, 2)


def test_a_piece_that_has_not_passed_is_an_import_error_that_says_what_to_do(folder):
    with pytest.raises(ImportError, match=r"There is no piece in mine/.*import ours from solutions"):
        from shared.mine import piece  # noqa: F401
    assert not hasattr(mine, "_ipython_display_")
