"""`make doctor` says what each check found and, if there is a problem, what to do."""

import importlib.metadata
import os
import re
import resource
import shutil
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
import torch

from shared import deepspeed_engine, hosts, ranks
from shared.deadlines import scaled
from shared.ranks import containers, devices, facts, machine, nccl, outlook
from tests import machines

ROOT = Path(__file__).parents[3]
CHECKED = (
    *("Python", "torch", "jupyterlab", "loopback ports", "own name", "port 8888", "cores", "free memory", "free disk"),
    *("open files", "GPUs", "NCCL", "/dev/shm", "shaped links", "DeepSpeed", "chromium", "bubblewrap", "two ranks"),
)


@pytest.mark.slow
def test_the_course_can_run_on_this_machine():
    done = subprocess.run([sys.executable, "-m", "shared.ranks.machine"], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout
    assert "The course can run here." in done.stdout and "started and ran an all-reduce in" in done.stdout
    lines = done.stdout.splitlines()
    for name in CHECKED:
        (line,) = [line for line in lines if line.startswith(f"{name} ")]
        assert len(re.split(r"\s{2,}", line)) == 3, line  # the check, what was found, and OK or what to do


def test_an_old_python_blocks_the_course(monkeypatch):
    monkeypatch.setattr(sys, "version_info", (3, 9, 1))
    (found,) = machine.python()
    assert found.blocks and "Install Python 3.11" in found.advice


def test_a_missing_package_blocks_the_course_and_another_version_does_not(monkeypatch):
    real = importlib.metadata.version

    def version(name):
        if name == "nbval":
            raise importlib.metadata.PackageNotFoundError(name)
        return "0.1" if name == "matplotlib" else real(name)

    monkeypatch.setattr(importlib.metadata, "version", version)
    found = {finding.name: finding for finding in machine.packages()}
    assert found["nbval"].blocks and not found["matplotlib"].blocks
    assert "tested with" in found["matplotlib"].advice and found["torch"].advice == ""


@pytest.mark.parametrize(("version", "tested"), [("2.13.0+cpu", True), ("2.14.1", True), ("2.14.0", False)])
def test_both_tested_versions_of_torch_are_ok(monkeypatch, version, tested):
    monkeypatch.setattr(importlib.metadata, "version", lambda name: version)
    torch_row = next(finding for finding in machine.packages() if finding.name == "torch")
    advice = "The course is tested with 2.13.0 and 2.14.1. `make lab` installs a tested version."
    assert torch_row.advice == ("" if tested else advice)


def test_a_closed_loopback_blocks_the_course(monkeypatch):
    def refuse(*_, **__):
        raise OSError("Operation not permitted")

    monkeypatch.setattr(socket, "create_server", refuse)
    (found,) = machine.loopback()
    assert found.blocks and "Operation not permitted" in found.found


def test_too_little_memory_blocks_the_course_and_few_cores_do_not(monkeypatch):
    monkeypatch.setattr(os, "cpu_count", lambda: 2)
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=1e9))
    cores, memory, disk = machine.resources()
    assert memory.blocks and not cores.blocks and not disk.advice
    assert "compare times only within one run" in cores.advice


# -- GPUs and libraries, on machines that nobody has here


def shown(facts) -> str:
    """Return everything that is said about a machine."""
    rows = [f"{finding.name}: {finding.found} | {finding.advice}" for finding in outlook.findings(facts)]
    return "\n".join([*rows, *outlook.outlook(facts)])


EXPECTED = {
    "cpu_only": (
        "2 and 4 ranks will run on the CPU with gloo, the backend for CPUs. You can trust values, bytes and memory.",
        "4 ranks share 2 cores here: compare them only within one run",
        "NCCL, the backend for GPUs, will not run here.",
    ),
    "cuda_build_without_gpu": (
        "GPUs: none",
        "2 and 4 ranks will run on the CPU",
        "PyTorch's build for CUDA 13.0 works without a GPU too",
    ),
    "cpu_build_with_gpu": (
        "NVIDIA L4, but PyTorch sees none | Install PyTorch's CUDA build",
        "This machine has a GPU, but PyTorch's CPU build is installed.",
    ),
    "old_driver": (
        "550.54, supports CUDA 12.4 | PyTorch was built for CUDA 13.0, which needs a newer driver.",
        "PyTorch cannot use it: it was built for CUDA 13.0, and driver 550.54 supports CUDA up to 12.4.",
    ),
    "hidden": ("This machine has 2 GPUs, but CUDA_VISIBLE_DEVICES='' hides them.",),
    "one_gpu": (
        "1 rank will use NCCL. It has no other rank to send to",
        "2 and 4 ranks will run on the CPU with gloo, the backend for CPUs, because NCCL before 2.30 needs one GPU per",
        "NCCL: 2.28.9 in PyTorch | `make lab COURSE_TORCH=2.14.1` installs one with which ranks can share a GPU.",
        "ranks on NCCL: 1, with one GPU per rank",
        'With `ranks.start(4, backend="gloo")`, ranks share the GPU. Only collectives work there, not send and receive',
    ),
    "one_gpu_shared": (
        "NCCL: 2.30.7 in /venv/libnccl.so.2 | \n",
        "ranks on NCCL: up to 4, sharing GPUs through MPS | \n",
        "1 rank will use NCCL. It has no other rank",
        "2 and 4 ranks will share the GPU over NCCL. Compare their times only within one run.",
    ),
    "one_gpu_in_turns": (
        "ranks on NCCL: up to 4, sharing GPUs in turns | Their times do not count.",
        "2 and 4 ranks will share the GPU over NCCL. You can trust values, bytes and memory there, but no times",
    ),
    "two_gpus_shared": ("ranks on NCCL: up to 8", "1 and 2 ranks will use NCCL, with one", "4 ranks will share GPUs"),
    "two_without_peer_access": (
        "1 and 2 ranks will use NCCL",
        "4 ranks will run on the CPU with gloo",
        "GPU links: PCIe (PHB), and the GPUs cannot read each other's memory",
        "NCCL sends through the host's memory. Its times are real",
    ),
    "eight_gpus": (
        "8 × NVIDIA H200 (140 GiB) | \n",
        "GPU links: NVLink (NV18) | \n",
        "1, 2, 4 and 8 ranks will use NCCL, with one GPU per rank. You can trust values, bytes, memory and times.",
    ),
    "small_shm": ("/dev/shm: 64 MiB | Nothing to do: gloo does not use it.", "enough for the course", "Bus error"),
    "small_shm_four_gpus": ("docker run --shm-size=1g", "about 10 MB there for each connection", "No space left"),
    "mig": (
        "MIG: enabled",
        "1 rank uses an instance, and more ranks use the CPU",
        "this NCCL cannot connect instances",
        "nvidia-smi -mig 0",
    ),
    "busy": ("GPU 1: 5 GiB of 140 GiB free | Use only the other GPUs: CUDA_VISIBLE_DEVICES=0,2", "cannot be trusted"),
    "mig_shared": ("MIG: enabled | Nothing to do: 1 rank uses an instance, and more ranks share it.",),
    "exclusive": ("nvidia-smi -c DEFAULT", "Ranks cannot share a GPU here, because the compute mode"),
    "exclusive_with_mps": ("compute mode: exclusive | \n", "2 and 4 ranks will share the GPU over NCCL."),
    "exclusive_without_mps": (
        "NCCL: 2.30.7 in PyTorch | \n",
        "compute mode: exclusive | Ranks cannot share a GPU. `sudo nvidia-smi -c DEFAULT` changes that.",
        "2 and 4 ranks will run on the CPU with gloo, the backend for CPUs, because the compute mode lets only one",
    ),
    "broken": (
        "Ranks on GPU 1 will fail: CUDA error: uncorrectable ECC error. Leave it out with CUDA_VISIBLE_DEVICES=0.",
    ),
    "no_answer": ("GPUs: unknown", "gave no answer within 120 s", "RANKS_BACKEND=gloo:cpu"),
}


@pytest.mark.parametrize("name", machines.ALL)
def test_it_says_what_works_on_a_machine(name):
    said = shown(machines.ALL[name])
    assert [text for text in EXPECTED[name] if text not in said] == [], said


@pytest.mark.parametrize("name", machines.ALL)
def test_it_says_only_what_concerns_the_machine(name):
    said, facts = shown(machines.ALL[name]), machines.ALL[name]
    assert ("GPU links" in said) == ("NVLink" in said or "PCIe" in said) == (len(facts.gpus) > 1)
    assert ("MIG" in said) == facts.mig and ("MPS" in said) == (outlook.shares(facts) and bool(facts.gpus))
    assert ("shm-size" in said) == (facts.shm_bytes < outlook.LITTLE_SHM_BYTES)
    assert ("too old" in said or "newer driver" in said) == (name == "old_driver")
    assert not re.search(r"  |\.\.|None|\(\)|\b1 (?:ranks|cores|GPUs)\b", said.replace("...", "")), said


@pytest.mark.parametrize("name", [name for name, facts in machines.ALL.items() if facts.torch])
@pytest.mark.parametrize("world_size", [1, 2, 4, 8])
def test_ranks_are_placed_as_it_says(monkeypatch, name, world_size):
    facts = machines.ALL[name]
    monkeypatch.delenv("RANKS_BACKEND", raising=False)
    monkeypatch.setattr(devices, "gpu_count", lambda: len(facts.gpus))
    monkeypatch.setattr(torch.distributed, "is_nccl_available", lambda: bool(facts.nccl))
    monkeypatch.setattr(nccl, "version_for_ranks", lambda: tuple(map(int, facts.nccl.split("."))))
    placement = devices.place(world_size)
    if facts.exclusive and not facts.mps and placement.ranks_per_gpu > 1:
        placement = placement.fallback  # NCCL will not start there
    assert outlook.uses_nccl(facts, world_size) == ("nccl" in placement.backend)
    assert outlook.uses_nccl(facts, world_size) == placement.devices[0].startswith("cuda")


def test_variables_that_override_the_choice_are_named():
    (sentence,) = outlook.overridden({"RANKS_BACKEND": "gloo:cpu", "RANKS_SIMULATE": ""})
    assert sentence.startswith("RANKS_BACKEND=gloo:cpu is set")


def test_facts_survive_json():
    for machine_facts in machines.ALL.values():
        assert facts.Facts.from_json(machine_facts.to_json()) == machine_facts


def test_the_facts_about_this_machine_are_gathered_in_another_process():
    here = facts.ask()
    assert here.torch == torch.__version__ and here.cores >= 1
    assert len(here.gpus) == torch.cuda.device_count()


@pytest.mark.parametrize(
    ("program", "problem"),
    [
        ("import time; time.sleep(60)", "gave no answer within"),
        ("raise RuntimeError('driver is broken')", "RuntimeError: driver is broken"),
        ("import os; os.abort()", "exit status -6"),
    ],
    ids=["hangs", "raises", "crashes"],
)
def test_facts_say_why_they_are_missing(monkeypatch, tmp_path, program, problem):
    (tmp_path / "facts.py").write_text(program)
    monkeypatch.setattr(facts, "__file__", str(tmp_path / "facts.py"))
    here = facts.ask(timeout_s=60 if "sleep" not in program else 0.5)
    assert problem in here.problem and here.cores >= 1 and not here.torch


def test_what_nvidia_smi_prints_is_read():
    printed = "NVIDIA H200, 580.65.06, Disabled, Default\nNVIDIA H200, 580.65.06, Enabled, Exclusive_Process\n"
    assert facts.parse_smi(printed) == (("NVIDIA H200", "NVIDIA H200"), "580.65.06", True, True)
    assert facts.parse_smi("NVIDIA L4, 550.54, [N/A], Default\n") == (("NVIDIA L4",), "550.54", False, False)
    assert facts.parse_smi("") == facts.parse_smi("No devices were found\n") == ((), "", False, False)


TOPOLOGY = """\t\x1b[4mGPU0\tGPU1\tGPU2\tNIC0\tCPU Affinity\tNUMA Affinity\tGPU NUMA ID\x1b[0m
GPU0\t X \tNV18\tSYS\tPXB\t0-47\t0\tN/A
GPU1\tNV18\t X \tSYS\tNODE\t0-47\t0\tN/A
GPU2\tSYS\tSYS\t X \tPIX\t48-95\t1\tN/A
NIC0\tPXB\tNODE\tPIX\t X \t\t\t

Legend:

  SYS  = Connection traversing PCIe as well as the SMP interconnect between NUMA nodes
"""


def test_links_between_gpus_are_read_from_the_topology():
    assert facts.parse_topology(TOPOLOGY) == ("NV18", "SYS")
    assert facts.parse_topology("") == ()


def test_cudas_version_is_read_from_the_drivers_number():
    assert [facts.as_version(number) for number in (11080, 12040, 13000)] == ["11.8", "12.4", "13.0"]


# -- other checks


def test_a_port_in_use_is_reported_and_does_not_block_the_course(monkeypatch):
    with socket.create_server(("127.0.0.1", 0)) as server:
        monkeypatch.setattr(machine, "LAB_PORT", server.getsockname()[1])
        (in_use,) = machine.lab_port()
    (free,) = machine.lab_port()
    assert in_use.found == "in use" and "the next free port" in in_use.advice and not in_use.blocks
    assert (free.found, free.advice) == ("free", "")


@pytest.mark.parametrize("installed", [[], ["bwrap", "chromium-browser"]])
def test_programs_for_tests_and_grading_are_optional(monkeypatch, installed):
    monkeypatch.setattr(shutil, "which", lambda name: name if name in installed else None)
    browser, sandbox = machine.programs()
    assert not browser.blocks and not sandbox.blocks
    assert bool(browser.advice) == bool(sandbox.advice) == (not installed)
    assert installed or ("the browser tests" in browser.advice and "apt-get install bubblewrap" in sandbox.advice)


def test_missing_optional_features_do_not_block_the_course(monkeypatch):
    monkeypatch.setattr(hosts, "why_not", lambda: "Namespaces are not allowed here.")
    monkeypatch.setattr(deepspeed_engine, "why_not", lambda: "DeepSpeed is not installed. Do this.")
    findings = [*machine.links(), *machine.deepspeed()]
    assert all(finding.advice and not finding.blocks for finding in findings)


def test_ranks_that_do_not_start_block_the_course(monkeypatch):
    def refuse(**_):
        raise ranks.RanksError("The ranks did not start: no")

    monkeypatch.setattr(ranks, "start", refuse)
    (found,) = machine.two_ranks()
    assert found.blocks and found.advice == "The ranks did not start: no"


def raises(error: Exception):
    def function(*_, **__):
        raise error

    return function


def test_a_name_without_an_address_concerns_only_torchrun(monkeypatch):
    monkeypatch.setattr(socket, "gethostname", lambda: "students-laptop")
    monkeypatch.setattr(socket, "gethostbyname", raises(socket.gaierror(-3, "Temporary failure in name resolution")))
    (found,) = machine.own_name()
    assert not found.blocks and "students-laptop has no address" in found.found
    assert "Ranks do not need it" in found.advice and "/etc/hosts" in found.advice


@pytest.mark.parametrize(
    ("name", "found", "advice"),
    [
        (None, None, None),
        ("wlan7", "wlan7, which is no interface here", "unset it, or choose one of lo, eth0."),
        ("eth0,wlan7", "eth0,wlan7, which is no interface here", "Ranks ignore it, but torchrun does not"),
        ("eth0", "eth0", "Nothing to do"),
    ],
)
def test_the_interface_of_another_machine_is_named(monkeypatch, name, found, advice):
    monkeypatch.setattr(socket, "if_nameindex", lambda: [(1, "lo"), (2, "eth0")])
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    if name:
        monkeypatch.setenv("GLOO_SOCKET_IFNAME", name)
    findings = list(machine.interface())
    assert [finding.found for finding in findings] == ([found] if found else [])
    assert all(advice in finding.advice and not finding.blocks for finding in findings)


@pytest.mark.parametrize(("most", "blocks"), [(64, True), (119, True), (120, False), (resource.RLIM_INFINITY, False)])
def test_too_few_open_files_block_the_course(monkeypatch, most, blocks):
    monkeypatch.setattr(resource, "getrlimit", lambda which: (64, most))
    (found,) = machine.open_files()
    assert found.blocks == blocks and ("`ulimit -Hn 120`" in found.advice) == blocks


@pytest.mark.parametrize(
    ("left_bytes", "advice", "blocks"),
    [(4e9, "", False), (1e9, "docker run --memory=2g", False), (1e8, "docker run --memory=2g", True)],
)
def test_the_memory_of_a_container_counts(monkeypatch, left_bytes, advice, blocks):
    monkeypatch.setattr(containers, "left_bytes", lambda: int(left_bytes))
    _, memory, _ = machine.resources()
    assert "in this container" in memory.found
    assert advice in memory.advice and bool(advice) == bool(memory.advice) and memory.blocks == blocks


@pytest.mark.skipif(sys.platform != "linux", reason="other systems have no user namespaces")
@pytest.mark.parametrize(
    ("setting", "value", "found", "command"),
    [
        ("kernel/apparmor_restrict_unprivileged_userns", "1", "AppArmor", "userns=0`"),
        ("kernel/unprivileged_userns_clone", "0", "the system", "clone=1`"),
        ("user/max_user_namespaces", "0", "the system", "user.max_user_namespaces=10000`"),
        ("user/max_user_namespaces", "100", "allowed", ""),
    ],
)
def test_forbidden_user_namespaces_are_named(monkeypatch, tmp_path, setting, value, found, command):
    (tmp_path / setting).parent.mkdir(parents=True)
    (tmp_path / setting).write_text(f"{value}\n")
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    (finding,) = machine.namespaces(tmp_path)
    assert finding.found.endswith(found) and command in finding.advice and bool(command) == bool(finding.advice)
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    assert not list(machine.namespaces(tmp_path))


@pytest.mark.parametrize("blocks", [False, True])
def test_a_check_that_hangs_is_left_behind_and_findings_are_shown_as_they_come(monkeypatch, capsys, blocks):
    ends = threading.Event()
    shown_before = []

    def hangs():
        yield outlook.Finding("first answer", "at once")
        ends.wait(60)

    def last():
        shown_before.append(capsys.readouterr().out)
        yield outlook.Finding("last", "fine")

    monkeypatch.setattr(machine, "CHECKS", (hangs, last))
    monkeypatch.setattr(machine, "DEADLINES_S", {hangs: 0.2})
    monkeypatch.setattr(machine, "here", lambda: machines.CPU_ONLY)
    if blocks:
        monkeypatch.setattr(machine, "two_ranks", hangs)
    began = time.monotonic()
    assert machine.main() == int(blocks)
    ends.set()
    assert time.monotonic() - began < scaled(20)
    assert "first answer" in shown_before[0] and "no answer within" in shown_before[0]
    assert "fine" in capsys.readouterr().out


def test_a_check_that_raises_is_reported_and_the_others_still_run(monkeypatch, capsys):
    def broken():
        raise RuntimeError("no such thing")

    monkeypatch.setattr(machine, "CHECKS", (broken, machine.python))
    assert machine.main() == 1
    printed = capsys.readouterr().out
    assert "RuntimeError: no such thing" in printed and "Python" in printed
    assert "cannot run here yet. Fix these problems first: broken" in printed
