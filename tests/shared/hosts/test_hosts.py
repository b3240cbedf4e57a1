"""Ranks on their own hosts: links keep their rate, ranks recover there, and nothing is left behind.

The functions without `test_` run on the ranks. Times are compared with the fastest that a link allows, because load on
this machine never makes a message faster.
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
from tests.shared.ranks.test_rank_processes import still_running

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[3]
MIB = 1 << 20
WHY_NOT = hosts.why_not()
needs_hosts = pytest.mark.skipif(WHY_NOT is not None, reason=str(WHY_NOT))


# -- rates and machines


@pytest.mark.parametrize(
    ("link", "rate"), [("1gbit", 1e9), ("2.5gbit", 2.5e9), ("100mbit", 1e8), ("5000 kbit", 5e6), ("1Gbit", 1e9)]
)
def test_rates_are_parsed(link, rate):
    assert hosts.bits_per_s(link) == rate


@pytest.mark.parametrize(
    "link", ["", "fast", "1", "1gb", "1 gbit/s", "0gbit", "-1gbit", "1kbit", "200gbit", "1..gbit", 1e9]
)
def test_invalid_rate_is_rejected_in_one_sentence(link):
    with pytest.raises(ValueError, match=r'^link must be a rate from "1mbit" to "100gbit", such as .*, got '):
        hosts.bits_per_s(link)


def test_message_names_missing_programs_and_their_packages(monkeypatch):
    monkeypatch.setenv("PATH", "/nowhere")
    monkeypatch.setattr(hosts, "_SYSTEM_PATH", "")
    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.setattr(hosts, "as_root", lambda: [])
    assert hosts.why_not() == "This machine lacks ip and tc. Install the packages iproute2 and util-linux."
    with pytest.raises(ValueError, match=r"lacks ip and tc\. .* Leave out the link, or emulate"):
        devices.check_link("1gbit")


def test_message_names_an_unsupported_system(monkeypatch):
    monkeypatch.setattr(sys, "platform", "darwin")
    expected = "Giving each rank its own host needs Linux network namespaces, but this system is darwin."
    assert hosts.why_not() == expected


@pytest.mark.skipif(sys.platform != "linux", reason="there is no /proc")
def test_message_quotes_a_missing_permission(monkeypatch):
    monkeypatch.setattr(hosts, "_path_of", lambda program: program)
    failing_prefix = ["sh", "-c", "echo 'unshare: unshare failed: Operation not permitted' >&2; exit 1"]
    monkeypatch.setattr(hosts, "as_root", lambda: failing_prefix)
    assert hosts.why_not() == (
        "This machine does not allow the course to create network namespaces with shaped links "
        "(unshare: unshare failed: Operation not permitted)."
    )


@pytest.mark.skipif(sys.platform != "linux", reason="there is no /proc")
def test_unshare_is_missing_only_for_those_who_need_it(monkeypatch):
    monkeypatch.setattr(hosts, "_path_of", lambda program: None if program == "unshare" else program)
    monkeypatch.setattr(hosts, "as_root", lambda: ["unshare", "--user"])
    assert hosts.why_not().startswith("This machine lacks unshare.")


def test_nccl_behind_a_link_is_rejected():
    with pytest.raises(ValueError, match="use backend='gloo'"):
        devices.place(2, "nccl", "1gbit")


@needs_hosts
def test_hosts_are_released_if_making_them_fails(monkeypatch):
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
    """Start four ranks on hosts behind 200 Mbit/s, where 1 MiB takes 42 ms. Yields the output of start."""
    if WHY_NOT:
        pytest.skip(WHY_NOT)
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        ranks.start(4, link="200mbit")
    yield printed.getvalue()
    ranks.stop()


def min_time_s(sent_bytes: float) -> float:
    """Return the least time for some bytes. The full token buckets at both ends pass without delay."""
    return (sent_bytes - 2 * hosts._BURST_BYTES) * 8 / hosts.bits_per_s("200mbit")


def run_cell(source: str) -> None:
    magic.cell("", source)


def measured(send) -> tuple[float, int, int]:
    """Run send() on all ranks at once. Returns the seconds from the first begin to the last end of all ranks, as a rank
    that leaves the barrier late begins when others have already sent, and this host's sent and received bytes."""
    dist.barrier()
    before, began_s = sockets.counters(), time.perf_counter()
    send()
    dist.barrier()
    ended_s, after = time.perf_counter(), sockets.counters()
    first_and_last = torch.tensor([-began_s, ended_s], dtype=torch.float64)
    dist.all_reduce(first_and_last, dist.ReduceOp.MAX)
    sent, received = after.sent_bytes - before.sent_bytes, after.received_bytes - before.received_bytes
    return first_and_last.sum().item(), sent, received


def all_reduce_of(nbytes: int):
    data = torch.ones(nbytes // 4)
    dist.all_reduce(data)
    return measured(lambda: dist.all_reduce(data))


def all_send_to(root: int, nbytes: int):
    def send():
        if dist.get_rank() == root:
            into = [torch.empty(nbytes // 4) for _ in range(dist.get_world_size())]
            for work in [dist.irecv(into[peer], peer) for peer in range(dist.get_world_size()) if peer != root]:
                work.wait()
        else:
            dist.send(torch.ones(nbytes // 4), root)

    return measured(send)


def one_sends_to_all(root: int, nbytes: int):
    def send():
        if dist.get_rank() == root:
            for work in [dist.isend(torch.ones(nbytes // 4), p) for p in range(dist.get_world_size()) if p != root]:
                work.wait()
        else:
            dist.recv(torch.empty(nbytes // 4), root)

    return measured(send)


def test_table_names_hosts_and_the_valid_measurements(behind_a_link):
    for rank in range(4):
        assert f"{rank}     host{rank}" in behind_a_link
    assert "this machine" not in behind_a_link
    assert "Each rank runs on its own host behind a 0.2 Gbit/s link, shaped by the kernel" in behind_a_link


def test_ranks_are_kept_for_the_same_link_and_for_an_invalid_one(behind_a_link, capsys):
    pids = ranks.current().pids
    with pytest.raises(ValueError, match="link must be a rate"):
        ranks.start(4, link="fast")
    ranks.start(4, link="200mbit")
    assert ranks.current().pids == pids
    assert "These ranks were already running" in capsys.readouterr().out


def test_all_reduce_takes_the_time_that_its_bytes_need(behind_a_link):
    nbytes = 2 * 3 / 4 * 4 * MIB
    for took_s, sent_bytes, received_bytes in ranks.run(all_reduce_of, 4 * MIB):
        assert took_s >= min_time_s(nbytes)
        assert nbytes < sent_bytes < 1.03 * nbytes
        assert nbytes < received_bytes < 1.03 * nbytes


def test_link_keeps_its_rate_towards_a_host(behind_a_link):
    """Three hosts send to one. Each has its own outgoing link, and they share the receiver's incoming link."""
    found = ranks.run(all_send_to, 0, MIB)
    assert found[0][0] >= min_time_s(3 * MIB)
    assert 3 * MIB < found[0][2] < 1.03 * 3 * MIB
    assert all(MIB < sent < 1.03 * MIB for _, sent, _ in found[1:])


def test_link_keeps_its_rate_from_a_host(behind_a_link):
    found = ranks.run(one_sends_to_all, 1, MIB)
    assert found[1][0] >= min_time_s(3 * MIB)
    assert 3 * MIB < found[1][1] < 1.03 * 3 * MIB


def ledger_of(op: str) -> wire.Ledger:
    size, rank = dist.get_world_size(), dist.get_rank()
    tensor, shard = torch.ones(MIB), torch.ones(MIB // size)  # 4 MiB, and a quarter of it
    all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
    launch = {
        "all_reduce": lambda: dist.all_reduce(tensor),
        "all_gather": lambda: all_gather(tensor, shard),
        "reduce_scatter": lambda: reduce_scatter(shard, tensor),
        "send": lambda: dist.send(tensor, 1) if rank == 0 else dist.recv(tensor, 0) if rank == 1 else None,
    }[op]
    launch()
    dist.barrier()
    with wire.ledger() as log:
        dist.barrier()  # no rank begins before every ledger is open
        launch()
        dist.barrier()
    return log


@pytest.mark.parametrize(
    ("op", "sent_mib", "least", "most"),
    [
        ("all_reduce", 6, 1.0, 1.03),
        ("all_gather", 3, 1.0, 1.03),
        ("send", 4, 1.0, 1.03),
        ("reduce_scatter", 3, 1.98, 2.06),  # that of gloo carries the bytes of an all-reduce
    ],
)
def test_the_interface_carries_the_bytes_in_the_ledger(behind_a_link, op, sent_mib, least, most):
    """Headers and barriers are added. On loopback, the ledger has the bytes of all ranks."""
    for log in ranks.run(ledger_of, op)[: 1 if op == "send" else None]:
        assert log.sent_bytes == sent_mib * MIB
        assert least < log.carried_bytes / log.sent_bytes < most


def step_of_fsdp() -> float:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    torch.manual_seed(0)
    model = fully_shard(torch.nn.Linear(8, 8), mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    group = dist.new_group(list(range(dist.get_world_size())))
    loss = model(torch.ones(2, 8)).sum()
    loss.backward()
    dist.all_reduce(torch.ones(1), group=group)
    return loss.item()


def test_process_groups_can_be_formed_later(behind_a_link):
    assert len(set(ranks.run(step_of_fsdp))) == 1


# -- faults


def host_of_this_rank() -> tuple[str, int]:
    return os.readlink("/proc/self/ns/net"), sockets.counters().sent_bytes


def holders(namespaces: set[str]) -> list[str]:
    """Return every process and every open file that keeps one of these namespaces."""
    kept = []
    for path in [*Path("/proc").glob("[0-9]*/task/*/ns/net"), *Path("/proc").glob("[0-9]*/fd/*")]:
        with contextlib.suppress(OSError):  # it may end while we look
            if os.readlink(path) in namespaces:
                kept.append(str(path))
    return kept


def assert_gone(namespaces: set[str]) -> None:
    """Check that no process is in these namespaces or holds them open, so that their interfaces are gone as well."""
    deadline = time.monotonic() + scaled(10.0)
    while (kept := holders(namespaces)) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not kept


def test_group_is_formed_again_on_the_same_hosts(behind_a_link):
    run_cell("marker = rank")
    namespaces = [name for name, _ in ranks.run(host_of_this_rank)]
    assert len(set(namespaces)) == 4
    with pytest.raises(ranks.CellFailed, match=r"Ranks 0, 1, 3 wait in all_reduce #\d+ .* for rank 2\.") as caught:
        run_cell("if rank != 2:\n    dist.all_reduce(torch.ones(5))")
    assert "a new process group is ready" in str(caught.value).lower()
    run_cell("total = torch.ones(1) * rank\ndist.all_reduce(total)")
    assert [value.item() for value in ranks.pull("total")] == [6.0] * 4
    assert ranks.pull("marker") == [0, 1, 2, 3]
    assert [name for name, _ in ranks.run(host_of_this_rank)] == namespaces


def test_interrupt_reaches_ranks_on_hosts(behind_a_link):
    timer = threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGINT))
    timer.start()
    with pytest.raises(ranks.CellFailed):
        run_cell("import time\nwhile True:\n    dist.all_reduce(torch.ones(1)); time.sleep(0.01)")
    run_cell("total = torch.ones(1)\ndist.all_reduce(total)")
    assert ranks.pull("total")[0].item() == 4


def test_dead_rank_is_restarted_on_its_host(behind_a_link):
    before = ranks.run(host_of_this_rank)
    with pytest.raises(ranks.CellFailed, match="Rank 1 died"):
        run_cell("import os\nif rank == 1: os._exit(9)\ndist.barrier()")
    after = ranks.run(host_of_this_rank)
    assert [name for name, _ in after] == [name for name, _ in before]
    with ranks.world(2):
        (took_s, *_), _ = ranks.run(all_reduce_of, 2 * MIB)
    assert took_s >= min_time_s(2 * MIB)


def test_two_sets_of_hosts_are_independent(behind_a_link):
    """They have the same addresses and interface names, and each set has its own switch."""
    before = [sent for _, sent in ranks.run(host_of_this_rank)]
    others = RankSet(2, link="1gbit")
    try:
        (outcome, _) = others.run(rankside.call, (all_reduce_of, (4 * MIB,), {}))
        their_hosts = {o.value[0] for o in others.run(rankside.call, (host_of_this_rank, (), {}))}
        assert outcome.value[0] >= (4 * MIB - 2 * hosts._BURST_BYTES) * 8 / 1e9
        assert 4 * MIB < outcome.value[1] < 1.03 * 4 * MIB
        assert len(their_hosts) == 2 and holders(their_hosts)
    finally:
        others.close()
    assert_gone(their_hosts)
    assert all(now - was < MIB for now, was in zip([s for _, s in ranks.run(host_of_this_rank)], before, strict=True))


@pytest.fixture(scope="module")
def two_per_host():
    """Start four ranks on two hosts behind 200 Mbit/s. Yields the output of start."""
    if WHY_NOT:
        pytest.skip(WHY_NOT)
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        ranks.start(4, link="200mbit", ranks_per_host=2, detect_mismatch=False)
    yield printed.getvalue()
    ranks.stop()


def all_reduces_in_pairs(inside: bool, nbytes: int) -> tuple[float, int]:
    """All-reduce in two pairs at once, each inside a host or between hosts. Returns seconds and the host's bytes."""
    pairs = [[0, 1], [2, 3]] if inside else [[0, 2], [1, 3]]
    group, data = dist.new_subgroups_by_enumeration(pairs)[0], torch.ones(nbytes // 4)
    dist.all_reduce(data, group=group)
    dist.barrier()
    before = sockets.counters()  # After the barrier in `measured`, the host's other rank may be ahead of this one.
    seconds = measured(lambda: dist.all_reduce(data, group=group))[0]
    return seconds, sockets.counters().sent_bytes - before.sent_bytes


def test_ranks_that_share_a_host_share_its_namespace(two_per_host):
    first, second, third, fourth = (name for name, _ in ranks.run(host_of_this_rank))
    assert first == second != third == fourth
    for rank in range(4):
        assert f"{rank}     host{rank // 2}" in two_per_host
    assert "2 ranks share each host, behind a 0.2 Gbit/s link" in two_per_host


def test_communication_inside_a_host_does_not_use_its_link(two_per_host):
    inside_s, inside_bytes = ranks.run(all_reduces_in_pairs, True, 4 * MIB)[0]
    between_s, between_bytes = ranks.run(all_reduces_in_pairs, False, 4 * MIB)[0]
    assert inside_bytes < MIB / 2 and 8 * MIB < between_bytes < 1.05 * 8 * MIB  # both pairs share the link
    assert between_s >= min_time_s(8 * MIB) > 2 * inside_s


def test_ranks_per_host_must_divide_the_ranks():
    with pytest.raises(ValueError, match="ranks_per_host must divide the 4 ranks, got 3"):
        ranks.start(4, link="200mbit", ranks_per_host=3)


# -- nothing is left behind

PROGRAM = """
import json, os, signal, sys, psutil
from shared import ranks
ranks.start(2, link="1gbit")
inside = ranks.run(lambda: __import__("os").readlink("/proc/self/ns/net"))
server = ranks.current()._server._process
files = [os.readlink(f"/proc/{server.pid}/fd/{name}") for name in os.listdir(f"/proc/{server.pid}/fd")]
held = [name for name in files if name.startswith("net:")]
assert len(held) == 3 and set(inside) < set(held), "expected two hosts and a switch"
found = [[p.pid, p.create_time(), p.cmdline()] for p in psutil.Process().children(recursive=True)]
print(json.dumps({"held": held, "found": found}), flush=True)
"""


@pytest.mark.exhaustive
@needs_hosts
@pytest.mark.parametrize("first", ["", "server.kill();"], ids=["alone", "together with the fork server"])
def test_killed_program_leaves_no_namespace_and_no_interface(first):
    interfaces = subprocess.run(["ip", "-o", "link"], capture_output=True, text=True).stdout
    source = PROGRAM + first + "os.kill(os.getpid(), signal.SIGKILL)"
    ran = subprocess.run([sys.executable, "-c", source], cwd=ROOT, capture_output=True, text=True)
    assert ran.returncode == -signal.SIGKILL, ran.stderr
    report = json.loads(ran.stdout.splitlines()[-1])
    try:
        assert_gone(set(report["held"]))
        assert subprocess.run(["ip", "-o", "link"], capture_output=True, text=True).stdout == interfaces
    finally:
        for left in still_running(report["found"]):  # what the fork server could not end
            with contextlib.suppress(psutil.NoSuchProcess):
                left.kill()
