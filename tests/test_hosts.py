"""Hosts of their own: links that keep their rate, ranks that heal there, and nothing that stays behind.

The functions without `test_` run on the ranks. Times are held against what a link allows at best: no load on this
machine makes a message faster.
"""

import contextlib
import io
import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import psutil
import pytest
import torch
import torch.distributed as dist

from shared import hosts, ranks, wire
from shared.deadlines import scaled
from shared.ranks import devices, magic, rankside
from shared.ranks.rankset import RankSet
from shared.wire import sockets
from tests.test_rank_processes import still_running

ROOT = Path(__file__).parent.parent
MIB = 1 << 20
WHY_NOT = hosts.why_not()
needs_hosts = pytest.mark.skipif(WHY_NOT is not None, reason=str(WHY_NOT))


# -- what can be asked for


@pytest.mark.parametrize(
    ("link", "rate"), [("1gbit", 1e9), ("2.5gbit", 2.5e9), ("100mbit", 1e8), ("5000 kbit", 5e6), ("1Gbit", 1e9)]
)
def test_rates_are_read(link, rate):
    assert hosts.bits_per_s(link) == rate


@pytest.mark.parametrize(
    "link", ["", "fast", "1", "1gb", "1 gbit/s", "0gbit", "-1gbit", "1kbit", "200gbit", "1..gbit", 1e9]
)
def test_what_is_no_rate_is_refused_in_one_sentence(link):
    with pytest.raises(ValueError, match=r'^link must be a rate from "1mbit" to "100gbit", such as .*, got '):
        hosts.bits_per_s(link)


def test_machine_without_ip_says_so_and_what_to_do(monkeypatch):
    monkeypatch.setenv("PATH", "/nowhere")
    monkeypatch.setattr(hosts, "_SYSTEM_PROGRAMS", "")
    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.setattr(hosts, "as_root", lambda: [])
    assert hosts.why_not() == "There is no ip and no tc on this machine (packages iproute2 and util-linux)."
    with pytest.raises(ValueError, match=r"no ip and no tc .* Leave link out, or emulate"):
        devices.check_link("1gbit")


def test_other_systems_say_so(monkeypatch):
    monkeypatch.setattr(sys, "platform", "darwin")
    assert hosts.why_not() == "Hosts of their own need Linux's network namespaces, and this is darwin."


@pytest.mark.skipif(sys.platform != "linux", reason="there is no /proc")
def test_machine_without_the_right_says_so(monkeypatch):
    monkeypatch.setattr(hosts, "_found", lambda program: program)
    refused = ["sh", "-c", "echo 'unshare: unshare failed: Operation not permitted' >&2; exit 1"]
    monkeypatch.setattr(hosts, "as_root", lambda: refused)
    assert hosts.why_not() == (
        "This machine does not let us make network namespaces with shaped links "
        "(unshare: unshare failed: Operation not permitted)."
    )


@pytest.mark.skipif(sys.platform != "linux", reason="there is no /proc")
def test_machine_without_unshare_says_so_to_those_who_need_it(monkeypatch):
    monkeypatch.setattr(hosts, "_found", lambda program: None if program == "unshare" else program)
    monkeypatch.setattr(hosts, "as_root", lambda: ["unshare", "--user"])
    assert hosts.why_not().startswith("There is no unshare on this machine")


def test_link_needs_ranks_that_talk_over_tcp():
    with pytest.raises(ValueError, match="use backend='gloo'"):
        devices.place(2, "nccl", "1gbit")


@needs_hosts
def test_half_made_hosts_are_let_go(monkeypatch):
    before = set(os.listdir("/proc/self/fd"))
    monkeypatch.setattr(hosts, "_BURST_BYTES", -1)
    monkeypatch.setattr(hosts, "_BURST_S", 0)
    monkeypatch.setattr(hosts, "as_root", lambda: [])
    with pytest.raises(OSError):
        hosts.build(2, 1e9)
    assert set(os.listdir("/proc/self/fd")) == before


# -- links


@pytest.fixture(scope="module")
def behind_a_link():
    """Four ranks on hosts behind 200 Mbit/s: 1 MiB takes 42 ms. → what start printed"""
    if WHY_NOT:
        pytest.skip(WHY_NOT)
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        ranks.start(4, link="200mbit")
    yield printed.getvalue()
    ranks.stop()


def at_best_s(sent_bytes: float) -> float:
    """Two full buckets, one at each end of the way, go through at once."""
    return (sent_bytes - 2 * hosts._BURST_BYTES) * 8 / hosts.bits_per_s("200mbit")


def run_cell(source: str) -> None:
    magic.cell("", source)


def counted(send) -> tuple[float, int, int]:
    """Run send() on all ranks at once. → seconds, bytes that this host's interface sent, and received"""
    dist.barrier()
    before, began_s = sockets.counters(), time.perf_counter()
    send()
    dist.barrier()
    took_s, after = time.perf_counter() - began_s, sockets.counters()
    return took_s, after.sent_bytes - before.sent_bytes, after.received_bytes - before.received_bytes


def all_reduce_of(nbytes: int):
    data = torch.ones(nbytes // 4)
    dist.all_reduce(data)
    return counted(lambda: dist.all_reduce(data))


def from_all_to(root: int, nbytes: int):
    def send():
        if dist.get_rank() == root:
            into = [torch.empty(nbytes // 4) for _ in range(dist.get_world_size())]
            for work in [dist.irecv(into[peer], peer) for peer in range(dist.get_world_size()) if peer != root]:
                work.wait()
        else:
            dist.send(torch.ones(nbytes // 4), root)

    return counted(send)


def from_one_to_all(root: int, nbytes: int):
    def send():
        if dist.get_rank() == root:
            for work in [dist.isend(torch.ones(nbytes // 4), p) for p in range(dist.get_world_size()) if p != root]:
                work.wait()
        else:
            dist.recv(torch.empty(nbytes // 4), root)

    return counted(send)


def test_table_names_hosts_and_says_what_is_valid(behind_a_link):
    for rank in range(4):
        assert f"{rank}     host{rank}" in behind_a_link
    assert "this machine" not in behind_a_link
    assert "Each rank is a host of its own behind a 0.2 Gbit/s link, shaped by the kernel" in behind_a_link


def test_same_link_keeps_the_ranks_and_a_refused_one_too(behind_a_link, capsys):
    pids = ranks.current().pids
    with pytest.raises(ValueError, match="link must be a rate"):
        ranks.start(4, link="fast")
    ranks.start(4, link="200mbit")
    assert ranks.current().pids == pids
    assert "These ranks were already running" in capsys.readouterr().out


def test_all_reduce_takes_the_time_of_its_bytes(behind_a_link):
    nbytes = 2 * 3 / 4 * 4 * MIB
    for took_s, sent_bytes, received_bytes in ranks.run(all_reduce_of, 4 * MIB):
        assert took_s >= at_best_s(nbytes)
        assert nbytes < sent_bytes < 1.03 * nbytes
        assert nbytes < received_bytes < 1.03 * nbytes


def test_link_keeps_its_rate_towards_a_host(behind_a_link):
    """Three hosts send to one: each has its own link out, and all share one link in."""
    found = ranks.run(from_all_to, 0, MIB)
    assert found[0][0] >= at_best_s(3 * MIB)
    assert 3 * MIB < found[0][2] < 1.03 * 3 * MIB
    assert all(MIB < sent < 1.03 * MIB for _, sent, _ in found[1:])


def test_link_keeps_its_rate_from_a_host(behind_a_link):
    found = ranks.run(from_one_to_all, 1, MIB)
    assert found[1][0] >= at_best_s(3 * MIB)
    assert 3 * MIB < found[1][1] < 1.03 * 3 * MIB


def ledger_of_an_all_reduce() -> wire.Ledger:
    data = torch.ones(MIB)
    dist.all_reduce(data)
    dist.barrier()
    with wire.ledger() as log:
        dist.barrier()
        dist.all_reduce(data)
        dist.barrier()
    return log


def test_ledger_counts_what_this_host_carried(behind_a_link):
    """On loopback it counts what all ranks carried."""
    for log in ranks.run(ledger_of_an_all_reduce):
        assert log.sent_bytes == 6 * MIB
        assert log.sent_bytes < log.carried_bytes < 1.03 * log.sent_bytes


def step_of_fsdp() -> float:
    from torch.distributed.fsdp import fully_shard

    torch.manual_seed(0)
    model = fully_shard(torch.nn.Linear(8, 8))
    group = dist.new_group(list(range(dist.get_world_size())))
    loss = model(torch.ones(2, 8)).sum()
    loss.backward()
    dist.all_reduce(torch.ones(1), group=group)
    return loss.item()


def test_groups_that_are_made_later_meet_too(behind_a_link):
    assert len(set(ranks.run(step_of_fsdp))) == 1


# -- faults


def host_of_this_rank() -> tuple[str, int]:
    return os.readlink("/proc/self/ns/net"), sockets.counters().sent_bytes


def holders(namespaces: set[str]) -> list[str]:
    """Every process, and every open file of one, that keeps one of these namespaces."""
    kept = []
    for path in [*Path("/proc").glob("[0-9]*/task/*/ns/net"), *Path("/proc").glob("[0-9]*/fd/*")]:
        with contextlib.suppress(OSError):  # it ends while we look
            if os.readlink(path) in namespaces:
                kept.append(str(path))
    return kept


def assert_gone(namespaces: set[str]) -> None:
    """A namespace that no process is in and that none holds open is gone, and its interfaces with it."""
    deadline = time.monotonic() + scaled(10.0)
    while (kept := holders(namespaces)) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not kept


def test_group_is_formed_again_on_the_same_hosts(behind_a_link):
    run_cell("marker = rank")
    where = [name for name, _ in ranks.run(host_of_this_rank)]
    assert len(set(where)) == 4
    with pytest.raises(ranks.CellFailed, match=r"Ranks 0, 1, 3 wait in all_reduce #\d+ .* for rank 2\.") as caught:
        run_cell("if rank != 2:\n    dist.all_reduce(torch.ones(5))")
    assert "a new process group is ready" in str(caught.value).lower()
    run_cell("total = torch.ones(1) * rank\ndist.all_reduce(total)")
    assert [value.item() for value in ranks.pull("total")] == [6.0] * 4
    assert ranks.pull("marker") == [0, 1, 2, 3]
    assert [name for name, _ in ranks.run(host_of_this_rank)] == where


def test_interrupt_reaches_ranks_on_hosts(behind_a_link):
    timer = threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGINT))
    timer.start()
    with pytest.raises(ranks.CellFailed):
        run_cell("import time\nwhile True:\n    dist.all_reduce(torch.ones(1)); time.sleep(0.01)")
    run_cell("total = torch.ones(1)\ndist.all_reduce(total)")
    assert ranks.pull("total")[0].item() == 4


def test_dead_rank_starts_again_on_its_host(behind_a_link):
    before = ranks.run(host_of_this_rank)
    with pytest.raises(ranks.CellFailed, match="Rank 1 died"):
        run_cell("import os\nif rank == 1: os._exit(9)\ndist.barrier()")
    after = ranks.run(host_of_this_rank)
    assert [name for name, _ in after] == [name for name, _ in before]
    with ranks.world(2):
        (took_s, *_), _ = ranks.run(all_reduce_of, 2 * MIB)
    assert took_s >= at_best_s(2 * MIB)


def test_two_sets_of_hosts_do_not_meet_and_one_ends_alone(behind_a_link):
    """They have the same addresses and the same names of interfaces, each behind a switch of its own."""
    before = [sent for _, sent in ranks.run(host_of_this_rank)]
    others = RankSet(2, link="1gbit")
    try:
        (found, _) = others.run(rankside.call, (all_reduce_of, (4 * MIB,), {}))
        their_hosts = {outcome.value[0] for outcome in others.run(rankside.call, (host_of_this_rank, (), {}))}
        assert found.value[0] >= (4 * MIB - 2 * hosts._BURST_BYTES) * 8 / 1e9
        assert 4 * MIB < found.value[1] < 1.03 * 4 * MIB
        assert len(their_hosts) == 2 and holders(their_hosts)
    finally:
        others.close()
    assert_gone(their_hosts)
    assert all(now - was < MIB for now, was in zip([s for _, s in ranks.run(host_of_this_rank)], before, strict=True))


# -- nothing stays

PROGRAM = """
import json, os, signal, sys, psutil
from shared import ranks
ranks.start(2, link="1gbit")
inside = ranks.run(lambda: __import__("os").readlink("/proc/self/ns/net"))
server = ranks.current()._server._process
files = [os.readlink(f"/proc/{server.pid}/fd/{name}") for name in os.listdir(f"/proc/{server.pid}/fd")]
held = [name for name in files if name.startswith("net:")]
assert len(held) == 3 and set(inside) < set(held), "two hosts and a switch"
found = [[p.pid, p.create_time(), p.cmdline()] for p in psutil.Process().children(recursive=True)]
print(json.dumps({"held": held, "found": found}), flush=True)
"""


@needs_hosts
@pytest.mark.parametrize("first", ["", "server.kill();"], ids=["alone", "together with the fork server"])
def test_killed_program_leaves_no_namespace_and_no_interface(first):
    interfaces = subprocess.run(["ip", "-o", "link"], capture_output=True, text=True).stdout
    source = PROGRAM + first + "os.kill(os.getpid(), signal.SIGKILL)"
    ran = subprocess.run([sys.executable, "-c", source], cwd=ROOT, capture_output=True, text=True)
    assert ran.returncode == -signal.SIGKILL, ran.stderr
    said = json.loads(ran.stdout.splitlines()[-1])
    try:
        assert_gone(set(said["held"]))
        assert subprocess.run(["ip", "-o", "link"], capture_output=True, text=True).stdout == interfaces
    finally:
        for left in still_running(said["found"]):  # the controller, where the fork server could not end it
            with contextlib.suppress(psutil.NoSuchProcess):
                left.kill()
