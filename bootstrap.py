"""Make the course's environment: `python3 bootstrap.py [--dev]`. `make lab` and `make test` call it.

It finds a Python, makes .venv (COURSE_VENV names another folder), installs what constraints.txt pins,
and leaves a mark in the environment so that the next call has nothing to do. When it cannot go on, it
says why in one sentence, and what it leaves behind is never taken for a finished environment.

Syntax and library are those of Python 3.6: an old Python must get as far as that sentence.
"""

import argparse
import collections
import contextlib
import hashlib
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent
OLDEST, NEWEST = (3, 11), (3, 14)  # the pinned packages have builds for these; environment.yml says the same
CPU_GB, CUDA_GB, UPDATE_GB = 3, 9, 1  # downloads and installed files together
MARK = "course-environment.txt"  # lives in the environment; only a folder that holds it is ever erased
UNFINISHED = "unfinished\n"
SHOWN_LINES = 15  # of what a failed command printed


class SetupError(Exception):
    """A reason to stop, as one sentence for the newcomer."""


# --- which Python -----------------------------------------------------------------------------------


def candidate_pythons():
    """Name the Pythons to try: the one that runs this, then those on PATH, newest first."""
    # Run by the environment's own Python we name the one below it: the environment may be erased.
    yield getattr(sys, "_base_executable", None) or sys.executable
    for minor in range(NEWEST[1], OLDEST[1] - 1, -1):
        path = shutil.which(f"python3.{minor}")
        if path:
            yield path


def probe(executable):
    """Ask a Python for its version and whether it can make environments. → ((3, 12), True), or None if it fails"""
    question = "import sys; print(*sys.version_info[:2], flush=True); import ensurepip, venv"
    command = [str(executable), "-I", "-c", question]
    try:
        answer = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, encoding="utf-8")
        version = tuple(int(part) for part in answer.stdout.split())
    except (OSError, ValueError):
        return None
    return (version, answer.returncode == 0) if len(version) == 2 else None


def find_python(executables, ask=probe):
    """Return the first Python that the pins were made for and that can make environments, and its version."""
    unsuitable, without_venv = [], []
    for executable in executables:
        answer = ask(executable)
        if answer is None:
            continue
        version, can_make_venvs = answer
        if not OLDEST <= version <= NEWEST:
            unsuitable.append(f"{dotted(version)} ({executable})")
        elif can_make_venvs:
            return executable, version
        else:
            without_venv.append((executable, version))
    if without_venv:
        raise SetupError(no_venv_sentence(*without_venv[0]))
    offered = "only " + ", ".join(unsuitable) if unsuitable else "none that works"
    raise SetupError(
        f"The course needs Python {dotted(OLDEST)} to {dotted(NEWEST)}, and this machine offers {offered}: "
        "install one of them and run this again."
    )


def no_venv_sentence(executable, version):
    """Say which package brings what a Debian Python lacks."""
    number = dotted(version)
    return (
        f"Python {number} ({executable}) cannot make virtual environments: on Debian or Ubuntu, "
        f"`sudo apt install python3-venv` (python{number}-venv, if it is not the system's own Python), "
        "then run this again."
    )


def dotted(version):
    """Write a version tuple as people do."""
    return ".".join(str(part) for part in version)


def check_system(name):
    """Refuse Windows, where the ranks cannot be forked."""
    if name == "nt":
        raise SetupError("The course's ranks need Linux or macOS: on Windows, run this in WSL.")


# --- is there room ----------------------------------------------------------------------------------


def has_nvidia_driver():
    """Tell whether this machine has an NVIDIA driver, and so a use for torch's CUDA build."""
    return os.path.exists("/proc/driver/nvidia") or shutil.which("nvidia-smi") is not None


def free_bytes(folder):
    """Return the free space where folder is, or will be."""
    folder = Path(folder)
    while not folder.exists():
        folder = folder.parent
    return shutil.disk_usage(str(folder)).free


def check_disk(free, needed_gb, folder):
    """Refuse when the packages would not fit."""
    if free < needed_gb * 10**9:
        raise SetupError(
            f"The course's packages need about {needed_gb} GB, and {folder} has {free / 10**9:.1f} GB free: "
            "free some, or set COURSE_VENV to a folder on a larger disk, and run this again."
        )


# --- the mark: what an environment holds ------------------------------------------------------------


def venv_python(venv):
    """Return the environment's Python."""
    return Path(venv) / "bin" / "python"


def place_line(root, venv, version):
    """Describe what cannot change under an environment: its scripts hold these paths."""
    return f"Python {dotted(version)} in {venv} for {root}\n"


def contents_line(root, dev):
    """Return a hash of what decides which packages are installed."""
    digest = hashlib.sha256(b"dev" if dev else b"")
    for name in ("pyproject.toml", "constraints.txt"):
        digest.update((root / name).read_bytes())
    return digest.hexdigest() + "\n"


def read_mark(venv):
    """Return the environment's mark, or None where we made no environment."""
    try:
        return (venv / MARK).read_text(encoding="utf-8")
    except OSError:
        return None


def is_reusable(root, venv, mark, ask=probe):
    """Tell whether a finished environment is here whose Python still works: pip may install over it."""
    if mark is None:
        return False
    answer = ask(venv_python(venv))
    return answer is not None and mark.startswith(place_line(root, venv, answer[0]))


def is_ready(root, venv, dev, ask=probe):
    """Tell whether the environment holds what is asked for. One with the dev packages serves both commands."""
    mark = read_mark(venv)
    wanted = [contents_line(root, dev=True)] + ([] if dev else [contents_line(root, dev=False)])
    return is_reusable(root, venv, mark, ask) and mark.endswith(tuple(wanted))


# --- making it --------------------------------------------------------------------------------------


def set_up(root, venv, dev, run=None):
    """Bring the environment to what is asked for. The mark says unfinished from the first change to the last.

    Raises: SetupError, with the one sentence.
    """
    run = run or run_command
    mark = read_mark(venv)
    if mark is None and venv.exists() and any(venv.iterdir()):
        raise SetupError(
            f"{venv} exists and was not made by bootstrap.py: move it away, or set COURSE_VENV to another "
            "folder, and run this again."
        )
    if is_reusable(root, venv, mark):
        check_disk(free_bytes(venv), UPDATE_GB, venv)
        version = probe(venv_python(venv))[0]
        (venv / MARK).write_text(UNFINISHED, encoding="utf-8")
    else:
        if mark is not None:
            say(f"Removing the unfinished or outdated {venv}")
            shutil.rmtree(str(venv))
        version = make_venv(venv, run)
    install_packages(root, venv, dev, run)
    (venv / MARK).write_text(place_line(root, venv, version) + contents_line(root, dev), encoding="utf-8")


@contextlib.contextmanager
def one_at_a_time(path):
    """Wait until no other set-up runs: to this one, what that one makes looks unfinished."""
    import fcntl  # Windows lacks it, and must get as far as its own sentence

    with open(str(path)) as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            say("Waiting for another set-up of this course to end")
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def make_venv(venv, run):
    """Make an empty environment. → the version of its Python"""
    python, version = find_python(candidate_pythons())
    check_disk(free_bytes(venv), CUDA_GB if has_nvidia_driver() else CPU_GB, venv.parent)
    say(f"Making the environment {venv} with Python {dotted(version)} ({python})")
    venv.mkdir(parents=True, exist_ok=True)
    (venv / MARK).write_text(UNFINISHED, encoding="utf-8")
    code, tail = run([str(python), "-I", "-m", "venv", str(venv)], cwd=str(venv))
    if code:
        print("\n".join(tail))
        raise SetupError(f"Python could not make the environment {venv}: its own words are above.")
    return version


def install_packages(root, venv, dev, run):
    """Install the course and its pinned packages."""
    say("Installing the pinned packages: a minute or more, PyTorch is large")
    pip = [str(venv_python(venv)), "-I", "-m", "pip", "install", "--no-input", "--disable-pip-version-check"]
    code, tail = run([*pip, "-c", "constraints.txt", "-e", ".[dev]" if dev else "."], cwd=str(root))
    if code:
        print("\n".join(tail))
        raise SetupError(pip_sentence(tail))


def pip_sentence(tail):
    """Say what to do about a pip that failed."""
    if any("No space left on device" in line for line in tail):
        return (
            f"The disk filled up while pip was installing (PyTorch's CUDA build needs about {CUDA_GB} GB): "
            "free some space, in the folder for temporary files too, and run this again."
        )
    return "pip could not install the packages (its last lines are above): check the network and run this again."


def run_command(command, cwd):
    """Run a command, showing the line it is at. → exit code, the last lines it printed"""
    tail = collections.deque(maxlen=SHOWN_LINES)
    environment = dict(os.environ, PIP_USER="0")  # a user's `pip --user` fails in a venv
    piped = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "encoding": "utf-8", "errors": "replace"}
    with subprocess.Popen(command, cwd=cwd, env=environment, **piped) as process:
        try:
            for line in process.stdout:
                tail.append(line.rstrip())
                show_progress(tail[-1])
        except BaseException:
            end_command(process)
            raise
        finally:
            show_progress("")
    return process.returncode, list(tail)


def end_command(process):
    """End a command. Ctrl-C in a terminal reached pip too: killed at once it would leave its downloads in /tmp."""
    try:
        process.wait(5)
    except subprocess.TimeoutExpired:
        process.terminate()


def show_progress(line):
    """Show one passing line on a terminal, in place of the last one."""
    if sys.stdout.isatty():
        width = shutil.get_terminal_size().columns - 4
        sys.stdout.write("\r\033[K" + ("  " + line.strip()[:width] if line else ""))
        sys.stdout.flush()


def say(line):
    """Print one step."""
    print(line, flush=True)


def main(argv=None):
    """Make the environment, or say in one sentence why not. → exit code"""
    parser = argparse.ArgumentParser(description="Make the course's environment in .venv (or COURSE_VENV).")
    parser.add_argument("--dev", action="store_true", help="add what builds the notebooks, tests and grades them")
    dev = parser.parse_args(argv).dev
    venv = (ROOT / os.path.expanduser(os.environ.get("COURSE_VENV") or ".venv")).resolve()
    started = time.time()
    try:
        check_system(os.name)
        with one_at_a_time(__file__):
            if not is_ready(ROOT, venv, dev):
                set_up(ROOT, venv, dev)
                say(f"The set-up took {time.time() - started:.0f} s")
        say(f"The environment is ready: {venv}")
        return 0
    except SetupError as error:
        print(error, file=sys.stderr)
        return 1
    except OSError as error:
        print(f"The environment could not be made: {error}.", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("\nStopped: the next run starts the set-up again.", file=sys.stderr)
        return 130


if __name__ == "__main__":
    sys.exit(main())
