"""`make doctor` says of each thing what was found, and of what is not as it should be what to do."""

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
TOLD = (
    *("Python", "torch", "jupyterlab", "loopback ports", "port 8888", "cores", "free memory", "free disk", "GPUs"),
    *("NCCL", "shaped links", "DeepSpeed", "chromium", "bubblewrap", "two ranks"),
)


def advice_of(look) -> dict[str, str]:
    return {each.what: each.advice for each in look()}


def test_on_this_machine_the_course_can_run():
    done = subprocess.run([sys.executable, "-m", "shared.ranks.machine"], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout
    assert "The course can run here." in done.stdout and "start and add up in" in done.stdout
    lines = done.stdout.splitlines()
    for what in TOLD:
        (line,) = [line for line in lines if line.startswith(f"{what} ")]
        assert len(re.split(r"\s{2,}", line)) == 3, line  # what, what was found, and OK or what to do


def test_an_old_python_stops(monkeypatch):
    monkeypatch.setattr(sys, "version_info", (3, 9, 1))
    (found,) = machine.python()
    assert found.stops and "install Python 3.11" in found.advice


def test_a_missing_package_stops_and_another_version_does_not(monkeypatch):
    real = importlib.metadata.version

    def version(name):
        if name == "nbval":
            raise importlib.metadata.PackageNotFoundError(name)
        return "0.1" if name == "matplotlib" else real(name)

    monkeypatch.setattr(importlib.metadata, "version", version)
    found = {each.what: each for each in machine.packages()}
    assert found["nbval"].stops and not found["matplotlib"].stops
    assert "tested with" in found["matplotlib"].advice and found["torch"].advice == ""


def test_a_closed_loopback_stops(monkeypatch):
    def refuse(*_, **__):
        raise OSError("Operation not permitted")

    monkeypatch.setattr(socket, "create_server", refuse)
    (found,) = machine.loopback()
    assert found.stops and "Operation not permitted" in found.found


def test_little_memory_stops_and_few_cores_do_not(monkeypatch):
    monkeypatch.setattr(os, "cpu_count", lambda: 2)
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=1e9))
    cores, memory, disk = machine.resources()
    assert memory.stops and not cores.stops and "ratios" in cores.advice and not disk.advice


@pytest.mark.parametrize(("count", "said"), [(0, "gloo on the CPU"), (2, "share them through gloo"), (4, "")])
def test_gpus_are_counted(monkeypatch, count, said):
    import torch

    monkeypatch.setattr(devices, "gpu_count", lambda: count)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda number: "a card")
    monkeypatch.setattr(torch.distributed, "is_nccl_available", lambda: False)
    found = advice_of(machine.gpus)
    assert said in found["GPUs"] and bool(found["GPUs"]) == bool(said)
    assert ("CUDA build" if count else "it is for GPUs") in found["NCCL"]


def test_nccls_version_is_told(monkeypatch):
    import torch

    monkeypatch.setattr(torch.distributed, "is_nccl_available", lambda: True)
    monkeypatch.setattr(torch.cuda.nccl, "version", lambda: (2, 28, 9))
    (found,) = [each for each in machine.gpus() if each.what == "NCCL"]
    assert (found.found, found.advice) == ("2.28.9", "")


def test_a_taken_port_is_told_and_does_not_stop(monkeypatch):
    with socket.create_server(("127.0.0.1", 0)) as server:
        monkeypatch.setattr(machine, "LAB_PORT", server.getsockname()[1])
        (taken,) = machine.lab_port()
    (free,) = machine.lab_port()
    assert taken.found == "taken" and "the next one" in taken.advice and not taken.stops
    assert (free.found, free.advice) == ("free", "")


@pytest.mark.parametrize("there", [[], ["bwrap", "chromium-browser"]])
def test_programs_for_tests_and_grading_are_optional(monkeypatch, there):
    monkeypatch.setattr(shutil, "which", lambda name: name if name in there else None)
    browser, sandbox = machine.programs()
    assert not browser.stops and not sandbox.stops
    assert bool(browser.advice) == bool(sandbox.advice) == (not there)
    assert there or ("the browser tests" in browser.advice and "apt-get install bubblewrap" in sandbox.advice)


def test_what_is_merely_missing_does_not_stop(monkeypatch):
    monkeypatch.setattr(hosts, "why_not", lambda: "Namespaces are not allowed here.")
    monkeypatch.setattr(deepspeed_engine, "why_not", lambda: "DeepSpeed is not installed: do this")
    found = [*machine.links(), *machine.peers()]
    assert all(each.advice and not each.stops for each in found)


def test_ranks_that_do_not_start_stop(monkeypatch):
    def refuse(**_):
        raise ranks.RanksError("The ranks did not start: no")

    monkeypatch.setattr(ranks, "start", refuse)
    (found,) = machine.two_ranks()
    assert found.stops and found.advice == "The ranks did not start: no"


def test_a_look_that_fails_is_a_finding_and_the_rest_is_told(monkeypatch, capsys):
    def broken():
        raise RuntimeError("no such thing")

    monkeypatch.setattr(machine, "LOOKS", (broken, machine.python))
    assert machine.main() == 1
    said = capsys.readouterr().out
    assert "RuntimeError: no such thing" in said and "Python" in said and "cannot run yet: broken" in said
