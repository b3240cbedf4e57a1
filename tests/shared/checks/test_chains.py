"""A lab passes its checks on right pieces of the earlier labs that are written differently, as a student's own may be.

The solutions of a lab are checked, while on the ranks, variants replace our pieces of all earlier labs.
"""

import importlib
import importlib.util
import sys
from pathlib import Path

import pytest

from instructor.build import chapters, module_names
from shared import ranks
from shared.checks.__main__ import run_file
from tests.simulated_nccl import only_first_checks

pytestmark = pytest.mark.slow

TESTS = Path(__file__).parents[2]
MODULES = {chapter.name: module_names(chapter) for chapter in chapters()}
STYLES = {
    "plain": (
        "01_collectives/waits_in_dicts",
        "02_manual_ddp/futures_and_tables",
        "03_gradient_bucketing/views_by_hook",
        "04_overlap/pairs_and_numbers",
        "07_zero1/vectors_and_chunks",
        "08_zero2/around_a_ring",
        "09_zero3/match_and_counters",
        "13_tensor_parallel/contexts_and_indices",
        "15_pipeline_parallel/priorities",
    ),
    "clever": (
        "01_collectives/no_filling_on_the_wire",
        "02_manual_ddp/stores_the_world",
        "03_gradient_bucketing/by_offsets",
        "04_overlap/pending_is_a_property",
        "07_zero1/foreach_and_halves",
        "08_zero2/adds_in_place",
        "09_zero3/tables_and_iterators",
        "13_tensor_parallel/hooks_and_rings",
        "15_pipeline_parallel/batched_and_recursive",
    ),
}
LABS = ("04_overlap", "07_zero1", "08_zero2", "09_zero3", "10_fsdp", "13_tensor_parallel", "17_gspmd")
LABS += ("18_3d_parallelism", "19_less_communication")
ALWAYS = {"plain": ("08_zero2", "18_3d_parallelism"), "clever": ("10_fsdp", "17_gspmd", "19_less_communication")}


@pytest.fixture(scope="module", autouse=True)
def four_fresh_ranks():
    ranks.start(world_size=4, detect_mismatch=False)
    yield
    ranks.stop()


def replace_pieces(variants: list[tuple[str, list[str]]]) -> list[str]:
    """Import the solutions anew, with pieces of variants instead of our own. Runs on a rank.

    Args:
        variants: For each variant, its path and the modules of its lab, in the order of the labs.

    Returns:
        The names of the replaced pieces.
    """
    for name in [name for name in sys.modules if name.split(".")[0] == "solutions"]:
        del sys.modules[name]  # The package, too: as its attributes, it would keep the modules of an earlier chain.
    replaced = []
    for number, (path, modules) in enumerate(variants):
        spec = importlib.util.spec_from_file_location(f"style_{number}", path)
        variant = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(variant)
        for module in (importlib.import_module(f"solutions.{name}") for name in modules):
            for name, piece in vars(variant).items():
                if hasattr(module, name) and getattr(piece, "__module__", "") == spec.name:
                    setattr(module, name, piece)
                    replaced.append(name)
    return replaced


def cases() -> list:
    """Return each style with each lab. `make test` tries some of them, `make test ALL=1` all."""
    return [
        pytest.param(style, lab, marks=[] if lab in ALWAYS[style] else pytest.mark.exhaustive)
        for style in STYLES
        for lab in LABS
    ]


@pytest.mark.parametrize(("style", "lab"), cases())
def test_a_lab_works_with_pieces_of_earlier_labs_in_another_style(style, lab):
    earlier = [name for name in STYLES[style] if name.split("/")[0] < lab]
    variants = [(str(TESTS / "variants" / f"{name}.py"), MODULES[name.split("/")[0]]) for name in earlier]
    assert len(ranks.run(replace_pieces, variants)[0]) >= len(earlier), "each variant replaces a piece"
    with only_first_checks(MODULES[lab][0]):
        verdicts = run_file(MODULES[lab][0], TESTS.parent / "solutions" / f"{MODULES[lab][0]}.py")
    failed = [verdict for verdict in verdicts if not verdict.passed]
    assert not failed, "\n".join(f"{v.exercise} · {v.check}: {v.evidence}" for v in failed)
