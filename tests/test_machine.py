"""`make doctor` says what each check found and, if there is a problem, what to do."""

import importlib.metadata
import os
import re
import shutil
import socket
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from shared import deepspeed_engine, hosts, ranks
from shared.ranks import devices, machine

ROOT = Path(__file__).parent.parent
CHECKED = (
    *("Python", "torch", "jupyterlab", "loopback ports", "port 8888", "cores", "free memory", "free disk", "GPUs"),
    *("NCCL", "shaped links", "DeepSpeed", "chromium", "bubblewrap", "two ranks"),
)


def advice_of(check) -> dict[str, str]:
    return {finding.name: finding.advice for finding in check()}


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


@pytest.mark.parametrize(
    ("count", "expected"), [(0, "gloo on the CPU"), (2, "3 or more ranks share GPUs through gloo"), (4, "")]
)
def test_gpus_are_counted(monkeypatch, count, expected):
    import torch

    monkeypatch.setattr(devices, "gpu_count", lambda: count)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda index: "a GPU")
    monkeypatch.setattr(torch.distributed, "is_nccl_available", lambda: False)
    advice = advice_of(machine.gpus)
    assert expected in advice["GPUs"] and bool(advice["GPUs"]) == bool(expected)
    assert ("CUDA build" if count else "only with GPUs") in advice["NCCL"]


def test_the_version_of_nccl_is_shown(monkeypatch):
    import torch

    monkeypatch.setattr(torch.distributed, "is_nccl_available", lambda: True)
    monkeypatch.setattr(torch.cuda.nccl, "version", lambda: (2, 28, 9))
    (found,) = [finding for finding in machine.gpus() if finding.name == "NCCL"]
    assert (found.found, found.advice) == ("2.28.9", "")


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


def test_a_check_that_raises_is_reported_and_the_others_still_run(monkeypatch, capsys):
    def broken():
        raise RuntimeError("no such thing")

    monkeypatch.setattr(machine, "CHECKS", (broken, machine.python))
    assert machine.main() == 1
    printed = capsys.readouterr().out
    assert "RuntimeError: no such thing" in printed and "Python" in printed
    assert "cannot run here yet. Solve these problems first: broken" in printed
