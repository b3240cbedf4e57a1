"""The two usual mistakes with sends and receives are diagnosed as what they are: a forgotten wait and a wrong shape."""

import os
import time

import pytest
import torch
import torch.distributed as dist

from shared import ranks
from shared.checks.engine.framework import CheckFailed, Exercise
from shared.deadlines import scaled
from shared.ranks import magic
from shared.wire import sizes

pytestmark = pytest.mark.slow  # the ranks are restarted, or hang until a deadline

SOON_S = scaled(10.0)

DROPS_THE_SEND = """
def swap(tensor):
    received = torch.empty_like(tensor)
    dist.isend(tensor, 1 - rank)
    dist.recv(received, 1 - rank)
    return received
"""
DROPS_THE_RECEIVE = """
def swap(tensor):
    received = torch.empty_like(tensor)
    dist.irecv(received, 1 - rank)
    dist.send(tensor, 1 - rank)
    return received
"""
WRONG_SHAPE = """
def swap(tensor):
    received = torch.empty(1)
    handle = dist.isend(tensor, 1 - rank)
    dist.recv(received, 1 - rank)
    handle.wait()
    return received
"""


def call_swap(swap):
    result = swap(torch.ones(1000))
    dist.barrier()
    return result


def check_of(source: str, capsys) -> tuple[list[str], float]:
    """Return the lines that a check of this piece displays, and the seconds it takes."""
    exercise = Exercise("9.9", "swap")
    for name in ("values", "wire"):
        exercise.check(name, world_sizes=(2,))(lambda attempt: attempt.run(call_swap))
    magic.cell("", source.strip())
    began = time.monotonic()
    with pytest.raises(CheckFailed):
        exercise()
    return capsys.readouterr().out.splitlines(), time.monotonic() - began


@pytest.mark.parametrize(
    ("source", "op", "line"),
    [
        (DROPS_THE_SEND, "isend", "swap, line 4: dist.isend(tensor, 1 - rank)"),
        (DROPS_THE_RECEIVE, "irecv", "swap, line 4: dist.irecv(received, 1 - rank)"),
    ],
    ids=["isend", "irecv"],
)
def test_a_dropped_handle_is_named_with_its_line(two_ranks, capsys, source, op, line):
    shown, seconds = check_of(source, capsys)
    text = "\n".join(shown)
    assert f"dropped the handle of an {op} without calling its wait(): {line}" in text
    assert "new_group" not in text and "Hint: do you call wait()" in text
    assert "– swap · wire" in text
    assert seconds < SOON_S
    magic.cell("", "kept = callable(swap)")
    assert ranks.pull("kept") == [True] * 2


def test_a_receive_into_a_tensor_that_is_too_small_is_named_with_its_line(two_ranks, capsys):
    shown, seconds = check_of(WRONG_SHAPE, capsys)
    text = "\n".join(shown)
    assert "it received 4000 bytes from rank" in text and "into a tensor of 4 bytes (swap, line 5)" in text
    assert "Hint: what are the shape and dtype" in text and "wait()" not in text
    assert "Your definitions were run again: swap." in text
    assert seconds < SOON_S


def test_a_handle_that_was_waited_for_is_not_blamed(two_ranks):
    magic.cell("", "handles = [dist.isend(torch.ones(1), 1 - rank), dist.irecv(torch.ones(1), 1 - rank)]")
    magic.cell("", "for handle in handles: handle.wait()\ndel handles, handle")
    with pytest.raises(ranks.CellFailed) as caught:
        magic.cell(f"--timeout {scaled(1):g}", "if rank == 0: pair = dist.new_group([0, 1])")
    assert "dropped the handle" not in str(caught.value)


def test_sizes_are_read_from_a_file_that_outlives_the_process(tmp_path):
    path = os.path.join(tmp_path, "sizes")
    recorder = sizes.Recorder(path)

    class Call:
        op, partner, number, payload_bytes, called_from = "recv", 3, 2, 4000, ("<ipython-input>", 7, "swap")

    recorder.write(Call)
    assert sizes.read(path) == [sizes.Transfer("recv", 3, 2, 4000, 7, "swap")]
    recorder.clear()
    assert sizes.read(path) == [] and sizes.read(path + "-missing") == []
