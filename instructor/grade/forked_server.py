"""Start the fork server as a fork of the judge, which has already imported torch.

A new Python process would have to import torch again, which takes more than a second of CPU time.
"""

import os
import signal
import subprocess
import time
import traceback
from dataclasses import dataclass, field
from typing import BinaryIO

from shared.ranks import fork_client, forkserver

_LOOKS_EVERY_S = 0.01
_MOST_DESCRIPTORS = 4096


@dataclass
class Forked:
    """A forked process, with the part of the interface of `Popen` that a ForkServer uses."""

    pid: int
    stdin: BinaryIO
    stdout: BinaryIO
    _status: int | None = field(default=None, init=False)

    def poll(self) -> int | None:
        """Return the exit status, or None while the process runs. The status −9 means that signal 9 ended it."""
        if self._status is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            self._status = os.waitstatus_to_exitcode(status) if pid else None
        return self._status

    def wait(self, timeout_s: float) -> int:
        """Wait until the process has ended.

        Raises:
            subprocess.TimeoutExpired: If it has not ended after timeout_s.
        """
        deadline = time.monotonic() + timeout_s
        while (status := self.poll()) is None:
            if time.monotonic() > deadline:
                raise subprocess.TimeoutExpired("fork server", timeout_s)
            time.sleep(_LOOKS_EVERY_S)
        return status

    def kill(self) -> None:
        if self.poll() is None:
            os.kill(self.pid, signal.SIGKILL)


class ForkServer(fork_client.ForkServer):
    """A fork server that is a fork of this process. Create it while this process has only one thread."""

    def _start(self, environment: dict[str, str], log: BinaryIO) -> Forked:
        """Fork a process in a new session. Its only open files are the log and the pipes to this process."""
        requests, to_it = os.pipe()
        from_it, events = os.pipe()
        pid = os.fork()
        if pid == 0:
            self._serve((requests, events, log.fileno()), environment)
        os.close(requests)
        os.close(events)
        return Forked(pid, os.fdopen(to_it, "wb"), os.fdopen(from_it, "rb"))

    def _serve(self, files: tuple[int, int, int], environment: dict[str, str]) -> None:
        """Serve requests with these files as standard input, output and error, then end this process. Never returns."""
        status = 1
        try:
            os.setsid()
            for target, file in enumerate(files):
                os.dup2(file, target)
            os.closerange(3, _MOST_DESCRIPTORS)  # This includes the pipe for the judge's results.
            os.environ.clear()
            os.environ.update(environment)
            forkserver.main(self.run_dir)
            status = 0
        except BaseException:
            traceback.print_exc()  # goes to the log
        finally:
            os._exit(status)
