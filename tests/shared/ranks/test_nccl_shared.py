"""Ranks that share a GPU over NCCL, tested without one: the choice, the library, MPS, and starts that fail or hang."""

import os
import shutil
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from shared import measure, ranks
from shared.deadlines import scaled
from shared.ranks import devices, fork_client, mps, nccl, rankset, rankside
from shared.ranks.devices import Placement

pytestmark = pytest.mark.exhaustive

ROOT = Path(__file__).parents[3]


@pytest.fixture
def machine(monkeypatch):
    """Pretend that the machine has some GPUs and an NCCL."""

    def pretend(gpus: int, version: str = "2.30.7", built_with_nccl: bool = True) -> None:
        monkeypatch.setattr(devices, "gpu_count", lambda: gpus)
        monkeypatch.setattr(dist, "is_nccl_available", lambda: built_with_nccl)
        monkeypatch.setattr(nccl, "version_for_ranks", lambda: nccl.as_version(version))

    monkeypatch.delenv("RANKS_BACKEND", raising=False)
    monkeypatch.setattr(nccl, "gave_up", "")
    return pretend


# -- the choice


@pytest.mark.parametrize(
    ("gpus", "version", "world_size", "expected"),
    [
        (4, "2.29.7", 4, ["cuda:0", "cuda:1", "cuda:2", "cuda:3"]),  # one GPU per rank
        (1, "2.29.7", 1, ["cuda:0"]),
        (1, "2.30.3", 2, ["cuda:0"] * 2),  # shared
        (1, "2.31.2", 4, ["cuda:0"] * 4),
        (2, "3.0.0", 3, ["cuda:0", "cuda:1", "cuda:0"]),
        (1, "2.29.7", 2, ["cpu"] * 2),  # too old
        (1, "2.30.7", 5, ["cpu"] * 5),  # too many
        (0, "2.30.7", 2, ["cpu"] * 2),
    ],
)
def test_the_backend_is_what_the_machine_can_do(machine, gpus, version, world_size, expected):
    machine(gpus, version)
    placement = devices.place(world_size)
    assert list(placement.devices) == expected
    assert placement.backend == ("gloo" if "cpu" in expected else devices.NCCL)
    shares = len(set(expected)) < len(expected) and "cpu" not in expected
    assert placement.ranks_per_gpu == (-(-world_size // gpus) if shares else 1)
    assert (placement.fallback is not None) == shares
    if gpus and "cpu" in expected:
        why = (
            "at most 4 ranks can share a GPU, and" if world_size > 4 else "only with NCCL 2.30 or later, and they would"
        )
        assert why in placement.valid


def test_a_build_without_nccl_uses_the_cpu(machine):
    machine(1, built_with_nccl=False)
    assert "because this build of PyTorch has no NCCL. You can" in devices.place(2).valid


def test_ranks_behind_a_link_and_ranks_on_the_cpu_by_request_share_no_gpu(machine):
    machine(1)
    assert devices.place(2, "gloo:cpu").devices == devices._place(None, 2, "1gbit").devices == ("cpu", "cpu")


@pytest.mark.parametrize("source", ["argument", "variable"])
@pytest.mark.parametrize(
    ("backend", "gpus", "version", "world_size", "texts"),
    [
        ("nccl:shared", 0, "2.30.7", 2, ["PyTorch sees no GPU"]),
        ("nccl:shared", 1, "2.29.7", 2, ["NCCL 2.30 or later", "would load 2.29.7", "make doctor"]),
        ("nccl:shared", 1, "2.30.7", 5, ["at most 4 ranks can share a GPU", "1 GPU for 5 ranks"]),
        ("nccl", 1, "2.30.7", 2, ["a GPU of its own", "has 1 GPU", "'nccl:shared'"]),
        ("nccl", 1, "2.29.7", 2, ["a GPU of its own", "has 1 GPU", "'gloo:cpu'"]),
        ("nccl:split", 1, "2.30.7", 2, ["'nccl', 'nccl:shared', 'gloo', 'gloo:cpu'", "'nccl:split'"]),
    ],
)
def test_what_is_requested_and_impossible_is_one_sentence(
    machine, monkeypatch, source, backend, gpus, version, world_size, texts
):
    machine(gpus, version)
    if source == "variable":
        monkeypatch.setenv("RANKS_BACKEND", backend)
    with pytest.raises(ValueError) as caught:
        devices.place(world_size, backend if source == "argument" else None)
    assert [text for text in texts if text not in str(caught.value)] == [] and "\n" not in str(caught.value)


def test_shared_gpus_on_request_have_no_fallback(machine):
    machine(1)
    placement = devices.place(2, "nccl:shared")
    assert placement.devices == ("cuda:0", "cuda:0") and placement.fallback is None


def test_what_can_be_trusted_depends_on_mps(machine):
    machine(1)
    placement = devices.place(2)
    assert "compare times within one run: 2 ranks share a GPU over NCCL." in placement.on_shared_gpus("").valid
    without = placement.on_shared_gpus("nvidia-cuda-mps-control is not installed").valid
    assert "but no times" in without and "in turns" in without and "is not installed)." in without


@pytest.mark.parametrize(("ranks_per_gpu", "channels"), [(2, "4"), (3, "2"), (4, "2"), (16, "1")])
def test_ranks_that_share_a_gpu_take_few_of_its_resources(monkeypatch, ranks_per_gpu, channels):
    monkeypatch.delenv("NCCL_MAX_CTAS", raising=False)
    found = nccl.environment(ranks_per_gpu)
    assert found["NCCL_MAX_CTAS"] == channels
    assert found["NCCL_MULTI_RANK_GPU_ENABLE"] == "1" and found["NCCL_NVLS_ENABLE"] == "0"
    for name, value in found.items():
        monkeypatch.setenv(name, value)
    assert nccl.memory_fraction() == pytest.approx(0.9 / ranks_per_gpu)


def test_results_say_where_they_were_measured(monkeypatch):
    monkeypatch.setattr(measure.links, "_uses_nccl", lambda: True)
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    assert measure.where() == "over NCCL"
    monkeypatch.setenv(nccl.RANKS_PER_GPU, "2")
    assert measure.where() == "over NCCL, where 2 ranks use one GPU in turns, so these times do not count"
    monkeypatch.setenv(mps.PIPES, "/tmp/pipes")
    assert measure.where() == "over NCCL, where 2 ranks use one GPU at the same time"


# -- the library


@pytest.fixture
def library(tmp_path):
    """Build libraries that know only their version."""
    compiler = shutil.which("cc") or pytest.skip("there is no C compiler here")

    def build(number: int, folder: str) -> str:
        path = tmp_path / folder / "nvidia" / "nccl" / "lib" / "libnccl.so.2"
        path.parent.mkdir(parents=True)
        source = f"int ncclGetVersion(int *version) {{ *version = {number}; return 0; }}"
        subprocess.run(
            [compiler, "-shared", "-Wl,-soname,libnccl.so.2", "-o", path, "-x", "c", "-"],
            input=source.encode(),
            check=True,
        )
        return str(path)

    return build


def test_the_version_of_a_library_is_asked_in_a_child(library, tmp_path):
    path = library(22907, "torch")
    assert nccl.version_of(path) == (2, 29, 7) and path not in Path("/proc/self/maps").read_text()
    assert nccl.version_of(str(tmp_path / "missing.so")) == nccl.UNKNOWN
    (tmp_path / "no_library.so").write_text("text")
    assert nccl.version_of(str(tmp_path / "no_library.so")) == nccl.UNKNOWN


def test_the_version_of_torchs_own_nccl_is_numbers_only(monkeypatch):
    monkeypatch.setattr(nccl, "to_preload", lambda: "")
    monkeypatch.setattr(nccl, "version_in_use", lambda: nccl.UNKNOWN)
    monkeypatch.setattr(torch.cuda.nccl, "version", lambda: (2, 30, 7, "rc1"))
    assert nccl.version_for_ranks() == (2, 30, 7)


@pytest.mark.parametrize(("number", "version"), [(23007, (2, 30, 7)), (22907, (2, 29, 7)), (2804, (2, 8, 4))])
def test_versions_are_read_from_a_number(number, version):
    assert nccl.decoded(number) == version


@pytest.fixture
def beside_torch(monkeypatch, tmp_path):
    """Pretend that torch is installed in one folder, other packages in another, and that there is a driver."""
    (tmp_path / "torch" / "torch").mkdir(parents=True)
    (tmp_path / "torch" / "torch" / "__init__.py").write_text("")
    spec = nccl.importlib.machinery.ModuleSpec("torch", None, is_package=True)
    spec.submodule_search_locations = [str(tmp_path / "torch" / "torch")]
    monkeypatch.setattr(nccl.importlib.util, "find_spec", lambda name: spec)
    monkeypatch.setattr(sys, "path", [str(tmp_path / "torch"), str(tmp_path / "other")])
    monkeypatch.setattr(nccl, "_DRIVERS", (str(tmp_path),))
    monkeypatch.setattr(nccl, "_SONAME", "libnccl.so.2")
    monkeypatch.delenv("LD_PRELOAD", raising=False)


@pytest.mark.parametrize(
    ("own", "other", "preloaded"),
    [(22907, 23007, True), (22907, 22802, False), (23007, 23102, False), (None, 23007, False)],
)
def test_a_newer_library_is_preloaded_only_if_it_is_needed(library, beside_torch, own, other, preloaded):
    if own:
        library(own, "torch")
    path = library(other, "other")
    assert nccl.to_preload() == (path if preloaded else "")


def test_nothing_is_preloaded_without_a_driver_or_over_the_users_choice(library, beside_torch, monkeypatch):
    library(22907, "torch")
    path = library(23007, "other")
    assert nccl.to_preload() == path and nccl.preloading() == {"LD_PRELOAD": path}
    monkeypatch.setenv("LD_PRELOAD", "/mine/libjemalloc.so.2")
    assert nccl.preloading() == {"LD_PRELOAD": f"{path}:/mine/libjemalloc.so.2"}
    monkeypatch.setenv("LD_PRELOAD", "/mine/libnccl.so.2")
    assert nccl.to_preload() == "" and nccl.preloading() == {}
    monkeypatch.delenv("LD_PRELOAD")
    monkeypatch.setattr(nccl, "_DRIVERS", ("/no/such/device",))
    assert nccl.to_preload() == ""


@pytest.mark.slow
@pytest.mark.skipif(torch.version.cuda is not None, reason="torch's CUDA build needs all functions of NCCL")
def test_the_fork_server_and_its_ranks_load_what_is_preloaded(library, monkeypatch, ranks_end_with_the_module):
    path = library(23007, "other")
    monkeypatch.setattr(nccl, "to_preload", lambda: path)
    ranks.stop()
    ranks.start(world_size=1)
    assert ranks.run(nccl.version_in_use) == [(2, 30, 7)] and ranks.run(nccl.path_for_ranks) == [path]
    ranks.stop()


def test_a_process_without_a_library_has_no_version_in_use():
    assert nccl.version_in_use() == nccl.UNKNOWN or torch.version.cuda


# -- MPS


@pytest.fixture
def control(monkeypatch, tmp_path):
    """Install a program in place of nvidia-cuda-mps-control."""

    def install(body: str) -> Path:
        program = tmp_path / "bin" / mps.PROGRAM
        program.parent.mkdir()
        program.write_text(f"#!{sys.executable}\n{textwrap.dedent(body)}")
        program.chmod(0o755)
        monkeypatch.setenv("PATH", f"{program.parent}:{os.environ['PATH']}")
        return tmp_path / "mps"

    monkeypatch.setattr(mps, "_USE_A_GPU", "")
    return install


SERVES = """
    import os, pathlib, signal, sys
    folder = pathlib.Path(os.environ["CUDA_MPS_PIPE_DIRECTORY"])
    if sys.argv[1:] == ["-f"]:
        (folder / "pid").write_text(str(os.getpid()))
        (folder / "control").touch()
        signal.pause()
    assert sys.stdin.read() == "quit\\n"
    os.kill(int((folder / "pid").read_text()), signal.SIGTERM)
"""


def is_running(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def test_mps_starts_in_a_folder_of_its_own_and_ends(control):
    folder = control(SERVES)
    daemon = mps.Mps(folder)
    assert daemon.environment[mps.PIPES] == str(folder) and is_running(daemon.pid)
    began_s = time.monotonic()
    daemon.close()
    assert not is_running(daemon.pid) and time.monotonic() - began_s < scaled(2)


@pytest.mark.parametrize(
    ("body", "use_a_gpu", "why"),
    [
        ("import sys; sys.exit('no permission for this user')", "", "ended at once: no permission for this user"),
        ("import time; time.sleep(60)", "", "was not ready within"),
        (SERVES, "import sys; sys.exit(1)", "could not use the GPU"),
        (SERVES, "import time; time.sleep(60)", "got no answer within"),
        (SERVES.replace("read() ==", "read() !="), "import sys; sys.exit(1)", "could not use the GPU"),  # nor end
    ],
)
def test_an_mps_that_does_not_serve_is_ended_and_says_why(control, monkeypatch, body, use_a_gpu, why):
    folder = control(body)
    monkeypatch.setattr(mps, "_USE_A_GPU", use_a_gpu)
    monkeypatch.setattr(mps, "_READY_S", 1.0)
    started = []
    real = subprocess.Popen
    monkeypatch.setattr(
        subprocess, "Popen", lambda *args, **options: started.append(real(*args, **options)) or started[-1]
    )
    with pytest.raises(mps.NoMps, match=why):
        mps.Mps(folder)
    assert started and not any(is_running(process.pid) for process in started)


def test_without_the_program_there_is_no_mps(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(mps.NoMps, match="nvidia-cuda-mps-control is not installed"):
        mps.Mps(tmp_path / "mps")
    with pytest.raises(mps.NoMps, match=r"not installed|too long"):
        mps.Mps(tmp_path / ("x" * 120))


DRIVER = """
int cuInit(unsigned flags) { return 0; }
int cuDeviceGet(int *device, int index) { return 0; }
int cuDevicePrimaryCtxRetain(void **context, int device) { return 0; }
"""


@pytest.fixture
def driver(monkeypatch, tmp_path):
    """Install a library in place of the driver's."""
    compiler = shutil.which("cc") or pytest.skip("there is no C compiler here")
    path = tmp_path / "driver" / "libcuda.so.1"
    path.parent.mkdir()
    subprocess.run([compiler, "-shared", "-o", path, "-x", "c", "-"], input=DRIVER.encode(), check=True)
    monkeypatch.setenv("LD_LIBRARY_PATH", str(path.parent))


@pytest.mark.slow
@pytest.mark.parametrize("killed", [False, True])
def test_mps_ends_with_the_fork_server(control, driver, tmp_path, killed):
    control(SERVES)
    folder = tmp_path / "run"
    folder.mkdir()
    server = fork_client.ForkServer(str(folder))
    try:
        assert server.start_mps() == ""
        first = server._mps["mps"]
        assert server.start_mps() == ""
        pid = server._mps["mps"]
        assert not is_running(first) and is_running(pid)
        if killed:
            server._process.kill()
    finally:
        server.close()
    ends(pid)


def ends(pid: int) -> None:
    deadline_s = time.monotonic() + scaled(5)
    while is_running(pid) and time.monotonic() < deadline_s:
        time.sleep(0.01)
    assert not is_running(pid)


# -- the start


ON_THE_CPU = Placement("gloo", ("cpu", "cpu"), "You can trust values.")


@pytest.fixture
def shares(monkeypatch, ranks_end_with_the_module):
    """Pretend that two ranks can share a GPU: they are on the CPU, but are treated as if they shared one."""
    ranks.stop()
    monkeypatch.setattr(nccl, "gave_up", "")
    monkeypatch.setattr(rankset, "SHARED_JOIN_TIMEOUT_S", scaled(2.0))

    def pretend(backend: str = "gloo", device: str = "cpu", automatic: bool = True) -> None:
        shared = Placement(backend, (device,) * 2, "", ranks_per_gpu=2, fallback=ON_THE_CPU if automatic else None)

        def place(*_):
            return ON_THE_CPU.because(nccl.gave_up) if nccl.gave_up and automatic else shared

        monkeypatch.setattr("shared.ranks.processes.place", place)

    yield pretend
    ranks.stop()


def add_up() -> float:
    import torch

    total = torch.ones(1)
    dist.all_reduce(total)
    return total.item()


@pytest.mark.slow
def test_ranks_that_share_a_gpu_get_its_environment_and_mps(shares, control, driver):
    control(SERVES)
    shares()
    ranks.start(2)
    names = ("NCCL_MULTI_RANK_GPU_ENABLE", nccl.RANKS_PER_GPU, mps.PIPES)
    (one, per_gpu, pipes), other = ranks.run(lambda: [os.environ.get(name) for name in names])
    assert (one, per_gpu) == ("1", "2") and pipes and other == [one, per_gpu, pipes]
    assert "compare times within one run" in ranks.current().placement.valid
    pid = ranks.current()._server._mps["mps"]
    assert is_running(pid)
    ranks.stop()
    ends(pid)


@pytest.mark.slow
def test_mps_starts_anew_only_after_the_old_ranks_have_ended(shares, monkeypatch):
    shares()
    ranks.start(2)
    old = ranks.current().pids
    running = []

    def start_mps(server: fork_client.ForkServer) -> str:
        running.append([pid for pid in old if pid not in server.ended])
        return "there is none here"

    monkeypatch.setattr(fork_client.ForkServer, "start_mps", start_mps)
    ranks.current().restart()
    assert running == [[]] and "(there is none here)" in ranks.current().placement.valid


@pytest.mark.slow
def test_ranks_that_do_not_start_are_not_blamed_on_nccl(shares, monkeypatch):
    def fails(*_):
        raise RuntimeError("no more processes")

    monkeypatch.setattr(fork_client.ForkServer, "start_ranks", fails)
    shares()
    with pytest.raises(ranks.RanksError, match="no more processes"):
        ranks.start(2)
    assert nccl.gave_up == ""


@pytest.mark.slow
def test_a_hang_without_a_cause_on_a_shared_gpu_may_be_a_gpu_that_is_used_up(shares, monkeypatch):
    shares()
    ranks.start(2)
    monkeypatch.setattr(rankset, "waits_for_nobody", lambda cell: len(cell.positions) == 2)
    with pytest.raises(ranks.CellFailed, match="NCCL hangs if its process groups use up that GPU"):
        ranks.run(time.sleep, 60, timeout_s=scaled(2))


@pytest.mark.slow
def test_a_start_that_fails_falls_back_to_the_cpu_and_says_so_once(shares, capsys):
    shares("cpu:gloo,cuda:nccl", "cuda:0")
    ranks.start(2)
    said = ranks.current().placement.valid
    assert said.startswith("The ranks run on the CPU, because NCCL did not start on a shared GPU (")
    assert said.endswith("). You can trust values.") and "\n" not in said and said in capsys.readouterr().out
    assert ranks.run(add_up) == [2.0, 2.0]
    assert ranks.run(lambda: os.environ.get(nccl.RANKS_PER_GPU)) == [None, None]
    ranks.stop()
    ranks.start(2)
    assert nccl.gave_up in ranks.current().placement.valid and ranks.current().starts == 1


@pytest.mark.slow
def test_a_start_that_hangs_falls_back_to_the_cpu(shares, monkeypatch):
    def join(*options):
        from shared.ranks import rankside

        if options[-1]:
            import time

            time.sleep(600)
        rankside.join(*options)

    monkeypatch.setattr(rankside, "join", join)
    shares()
    ranks.start(2)
    assert "because NCCL did not start on a shared GPU (Rank 0 did not become ready" in ranks.current().placement.valid
    assert ranks.run(add_up) == [2.0, 2.0]


@pytest.mark.slow
def test_a_start_that_was_requested_and_fails_is_an_error(shares):
    shares("cpu:gloo,cuda:nccl", "cuda:0", automatic=False)
    with pytest.raises(ranks.RanksError, match=r"did not (start|become ready)"):
        ranks.start(2)
