"""Every real link has sources, and its figures are plausible and agree with what was measured."""

import re

import pytest

from shared import formulas
from shared.planner.links import REAL_LINKS, RealLink, link_table

GB, GIB = 1e9, 1 << 30
BY_NAME = {link.name: link for link in REAL_LINKS}


@pytest.mark.parametrize("link", REAL_LINKS, ids=lambda link: link.name)
def test_every_figure_has_a_source(link: RealLink):
    for source in (link.alpha_source, link.bandwidth_source):
        assert re.search(r"issue \d+|commit \w{7}|RFC \d+|as for 100 Gbit/s", source)


@pytest.mark.parametrize("link", REAL_LINKS, ids=lambda link: link.name)
def test_no_adapter_is_faster_than_its_rate(link: RealLink):
    adapters = re.search(r"(?:(\d+) (?:InfiniBand )?adapters? of )?(\d+) Gbit/s", link.name)
    if adapters:
        assert link.bus_bytes_per_s <= int(adapters[1] or 1) * int(adapters[2]) / 8 * GB
    assert 1e-6 < link.alpha_s < 1e-4


def test_names_are_unique():
    assert len(BY_NAME) == len(REAL_LINKS)


def test_all_reduce_follows_the_rings_formula():
    link = BY_NAME["NVLink 4, in a host of 8 H100"]
    expected_s = 2 * 7 * 3.4e-6 + 2 * 7 / 8 * GB / (370 * GB)
    assert link.all_reduce_s(GB, 8) == pytest.approx(expected_s)
    assert link.all_reduce_s(GB, 8) == formulas.ring_all_reduce_s(GB, 8, link.alpha_s, link.beta_s_per_byte)


def test_formula_gives_the_time_that_nccl_tests_measured():
    """NVIDIA/nccl-tests issue 252: 1 GiB on 8 GPUs took 20.1 ms out of place and 19.3 ms in place."""
    link = BY_NAME["InfiniBand, 4 adapters of 200 Gbit/s per host"]
    assert 0.98 * 19.265e-3 < link.all_reduce_s(GIB, 8) < 1.02 * 20.079e-3


def test_table_has_a_row_per_link():
    table = link_table()
    assert [row[0] for row in table.rows] == list(BY_NAME)
    assert "all-reduce of 1 GB, ms" in table.header
