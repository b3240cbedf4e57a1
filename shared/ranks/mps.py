"""NVIDIA's Multi-Process Service (MPS), which lets processes use a GPU at the same time.

Without MPS, processes that share a GPU take turns, and a collective waits for every turn. On an H200 that two ranks
shared, an all-reduce of 1 KiB took 4.6 ms without MPS and 0.06 ms with it (benchmarks/README.md).

The fork server starts MPS's daemon for its ranks and ends it with them. The daemon's sockets are in a folder of its
own, so it does not interfere with another daemon on this machine.
"""

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

from shared.deadlines import scaled

PROGRAM = "nvidia-cuda-mps-control"
PIPES, LOGS = "CUDA_MPS_PIPE_DIRECTORY", "CUDA_MPS_LOG_DIRECTORY"
_READY_S = scaled(10.0)
_END_S = 2.0
_LONGEST_SOCKET = 100  # Linux allows 107 characters for the path of a socket
# Only a process that uses a GPU can tell whether MPS serves it. The driver's library is enough for that.
_USE_A_GPU = """import ctypes, sys
cuda, device, context = ctypes.CDLL("libcuda.so.1"), ctypes.c_int(), ctypes.c_void_p()
calls = [lambda: cuda.cuInit(0), lambda: cuda.cuDeviceGet(ctypes.byref(device), 0),
         lambda: cuda.cuDevicePrimaryCtxRetain(ctypes.byref(context), device)]
sys.exit(max(call() for call in calls) and 1)"""


class NoMps(Exception):
    """MPS cannot be used here. The message says why, as the end of a sentence."""


class Mps:
    """A running daemon.

    Args:
        folder: Where the daemon puts its sockets and logs. It is created.

    Raises:
        NoMps: If the program is missing, does not start, or does not serve a process within a few seconds.
    """

    def __init__(self, folder: Path):
        program = shutil.which(PROGRAM)
        if program is None:
            raise NoMps(f"{PROGRAM} is not installed")
        if len(str(folder / "control")) > _LONGEST_SOCKET:
            raise NoMps(f"the path of its folder is too long: {folder}")
        folder.mkdir(parents=True, exist_ok=True)
        self.environment = {PIPES: str(folder), LOGS: str(folder)}
        self._program = program
        with open(folder / "output", "wb") as output:
            self._daemon = subprocess.Popen(
                [program, "-f"],  # in the foreground, so that we notice its end
                env=os.environ | self.environment,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
            )
        self.pid = self._daemon.pid
        try:
            self._wait_until_it_serves(folder)
        except BaseException:
            self.close()
            raise

    def _wait_until_it_serves(self, folder: Path) -> None:
        deadline_s = time.monotonic() + _READY_S
        while not (folder / "control").exists():
            if self._daemon.poll() is not None:
                raise NoMps(f"{PROGRAM} ended at once{_last_words(folder)}")
            if time.monotonic() > deadline_s:
                raise NoMps(f"{PROGRAM} was not ready within {_READY_S:g} s")
            time.sleep(0.01)
        command = [sys.executable, "-S", "-P", "-c", _USE_A_GPU]
        try:
            trial = subprocess.run(command, env=os.environ | self.environment, capture_output=True, timeout=_READY_S)
        except subprocess.TimeoutExpired:
            raise NoMps(f"a process that used it got no answer within {_READY_S:g} s") from None
        if trial.returncode:
            raise NoMps("a process that used it could not use the GPU")

    def close(self) -> None:
        """End the daemon and the server that it has started."""
        with contextlib.suppress(OSError, subprocess.TimeoutExpired):
            subprocess.run(
                [self._program],
                input=b"quit\n",
                env=os.environ | self.environment,
                capture_output=True,
                timeout=_END_S,
            )
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._daemon.wait(_END_S)
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._daemon.pid, signal.SIGKILL)
        self._daemon.wait()


def _last_words(folder: Path) -> str:
    with contextlib.suppress(OSError):
        lines = (folder / "output").read_text(errors="replace", encoding="utf-8").split("\n")
        return next((f": {line.strip()[:200]}" for line in reversed(lines) if line.strip()), "")
    return ""
