"""Create the course's environment, then run Python in it, as in `python3 bootstrap.py -m tests.run`.

The environment is .venv or the folder in COURSE_VENV. A file in it, the mark, records what the environment contains and
which clone made it. Clones with the same pins can share an environment. A command holds a shared lock on the mark, and
a rebuild holds an exclusive lock.

There are two sets of pins: where `nvidia-smi` lists a GPU, constraints-gpu.txt replaces some of constraints.txt. An
environment with either set is kept, because machines with and without a GPU may share a clone. COURSE_TORCH names a
version of torch, and so chooses one of the sets.
"""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

try:
    import fcntl
except ImportError:
    sys.exit("The course's ranks need Linux or macOS. On Windows, run this in WSL.")

ROOT = Path(__file__).resolve().parent
VENV = (ROOT / os.path.expanduser(os.environ.get("COURSE_VENV") or ".venv")).resolve()
CPU_INDEX = "https://download.pytorch.org/whl/cpu"
# Students, and bundles, which have no tests, need no tools for tests. COURSE_EXTRAS names more extras, such as `site`.
EXTRAS = ["dev"] * ((ROOT / "tests").is_dir() and not os.environ.get("COURSE_STUDENT"))
EXTRAS += os.environ.get("COURSE_EXTRAS", "").split()
PYTHON, MARK = VENV / "bin" / "python", VENV / "course-environment.json"
# Python imports the clone in PYTHONPATH, or the one in which it is started, or the one that made the environment.
FIND_COURSE = """import os, sys; sys.path += [os.path.abspath(each) for each in [*sys.path, ".", "..", %a] \
if os.path.isdir(each + "/shared/checks")][:1]\n"""


def sets_of_pins():
    """Return the pins without and with an NVIDIA GPU, or only those that have the torch in COURSE_TORCH."""
    usual, forced = (ROOT / "constraints.txt").read_text(encoding="utf-8"), os.environ.get("COURSE_TORCH")
    for_gpu = (ROOT / "constraints-gpu.txt").read_text(encoding="utf-8").splitlines()
    differs = {pin.split("==")[0]: pin for pin in for_gpu}
    both = [usual, "\n".join(differs.get(pin.split("==")[0], pin) for pin in usual.split("\n"))]
    chosen = [pins for pins in both if not forced or "torch==" + forced in pins.split("\n")]
    if not chosen:
        versions = " or ".join(line[7:] for pins in both for line in pins.split("\n") if line.startswith("torch=="))
        sys.exit(f"COURSE_TORCH must be {versions}, and is {forced}.")
    return chosen


def has_gpu():
    """Return whether `nvidia-smi` lists a GPU, as it also does in WSL."""
    try:
        return b"GPU " in subprocess.check_output(["nvidia-smi", "-L"], stderr=subprocess.DEVNULL, timeout=30)
    except (OSError, subprocess.SubprocessError):
        return False


def cpu_index():
    """Return pip's option for the index of PyTorch's CPU builds, if it answers soon and pip has no index of its own."""
    asks = "import sys, urllib.request as r; r.urlopen(r.Request(sys.argv[1] + '/torch/', method='HEAD'), timeout=4)"
    try:
        own = subprocess.check_output([str(PYTHON), "-Im", "pip", "config", "list"], timeout=30)
        if any(word in own for word in (b"index", b"find-links")) or sys.platform != "linux":
            return []
        subprocess.run([str(PYTHON), "-Ic", asks, CPU_INDEX], timeout=5, stderr=subprocess.DEVNULL, check=True)
    except (OSError, subprocess.SubprocessError):
        return []
    return ["--extra-index-url", CPU_INDEX]


def wanted(pins, extras=EXTRAS):
    """Return what this clone needs, with these extras of pyproject.toml."""
    import tomllib  # Python 3.10 has no such module.

    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    packages = sum([project["optional-dependencies"].get(extra, []) for extra in extras], project["dependencies"])
    return {"folder": str(VENV), "python": str(PYTHON.resolve()), "pins": pins, **dict.fromkeys(packages, "package")}


def lock(mark, how):
    """Lock the mark. Waits for another setup, but not for programs that use the environment."""
    try:
        fcntl.flock(mark, how | fcntl.LOCK_NB)
    except BlockingIOError:
        if how == fcntl.LOCK_EX and MARK.read_text(encoding="utf-8"):
            sys.exit(f"{VENV} must be rebuilt but is in use: close JupyterLab, let tests end, and run this again.")
        print("Waiting for another setup of this environment", flush=True)
        fcntl.flock(mark, how)


def build(mark, made):
    """Add what the environment lacks, or make a new one. pip keeps the lock while it cleans up after Ctrl-C."""
    pins = sets_of_pins()
    kept = [each for each in pins if PYTHON.exists() and wanted(each, extras=[]).items() <= made.items()]
    gpu = not kept and has_gpu()
    needs = wanted(kept[0] if kept else pins[-1] if gpu else pins[0])
    mark.truncate(0)  # It stays empty until everything is installed.
    if kept:
        print(f"Adding tools to {VENV}", flush=True)
    else:
        print(f"Creating {VENV}: PyTorch is large, so this takes a minute or more", flush=True)
        create()
    pip = [str(PYTHON), "-Im", "pip", "install", "--no-input", "--disable-pip-version-check", "--no-compile"]
    pip += [] if sys.stdout.isatty() else ["-q"]  # In a terminal, pip shows its progress.
    VENV.joinpath("constraints.txt").write_text(needs["pins"], encoding="utf-8")
    pip += [] if kept or gpu else cpu_index()
    pip += ["-c", str(VENV / "constraints.txt"), *(name for name, kind in needs.items() if kind == "package")]
    if subprocess.Popen(pip, env=dict(os.environ, PIP_USER="0"), pass_fds=[mark.fileno()]).wait():
        sys.exit("pip failed for the reason above: check the network and the free disk space (3 GB, CUDA: 9 GB).")
    # pip would compile on one core. Some packages contain files for other versions of Python, which cannot be compiled.
    packages = str(next(VENV.glob("lib/python*/site-packages")))
    subprocess.call([str(PYTHON), "-Im", "compileall", "-qq", "-j0", packages], pass_fds=[mark.fileno()])
    MARK.write_text(json.dumps({**needs, "python": str(PYTHON.resolve()), "clone": str(ROOT)}), encoding="utf-8")


def create():
    """Replace the folder's contents with an environment that is empty but finds the course."""
    for path in set(VENV.iterdir()) - {MARK}:
        shutil.rmtree(str(path)) if path.is_dir() and not path.is_symlink() else path.unlink()
    if subprocess.call([sys._base_executable, "-Im", "venv", str(VENV)]):
        sys.exit("This Python cannot create environments: on Debian or Ubuntu, run `sudo apt install python3-venv`.")
    packages = next(VENV.glob("lib/python*/site-packages"))
    packages.joinpath("course.pth").write_text(FIND_COURSE % str(ROOT), encoding="ascii")


def prepare():
    """Build the environment unless it is ready. Returns its mark, open and under a shared lock."""
    VENV.mkdir(parents=True, exist_ok=True)
    if any(VENV.iterdir()) and not MARK.exists():
        sys.exit(f"{VENV} was not made by this bootstrap.py: move it away, or set COURSE_VENV to another folder.")
    mark = MARK.open("r" if MARK.exists() and not os.access(str(MARK), os.W_OK) else "a", encoding="utf-8")
    while True:
        lock(mark, fcntl.LOCK_SH)
        made = json.loads(MARK.read_text(encoding="utf-8") or "{}")
        if PYTHON.exists() and any(wanted(pins).items() <= made.items() for pins in sets_of_pins()):
            return mark
        if made.get("clone", str(ROOT)) != str(ROOT) and os.path.exists(made["clone"]):
            sys.exit(f"{VENV} has the packages of another clone, {made['clone']}: set COURSE_VENV to another folder.")
        lock(mark, fcntl.LOCK_EX)
        unchanged = json.loads(MARK.read_text(encoding="utf-8") or "{}") == made
        if unchanged:  # No other process has rebuilt it in the meantime.
            build(mark, made)


def main():
    """Prepare the environment, then replace this process with the command."""
    if not (3, 11) <= sys.version_info[:2] <= (3, 14):  # Even Python 3.6 can parse this file and get here.
        for other in filter(shutil.which, ("python3.14", "python3.13", "python3.12", "python3.11")):
            os.execvp(other, [other, *sys.argv])
        sys.exit("The course needs Python 3.11 to 3.14, but this is {}.{}: install one.".format(*sys.version_info))
    if os.pathsep in str(ROOT) + str(VENV):
        sys.exit(f"Python separates paths by colons: rename the folder with a colon in {ROOT} or {VENV}.")
    try:
        mark = prepare()
    except (OSError, ValueError, KeyboardInterrupt) as error:
        if not os.access(str(VENV if VENV.exists() else VENV.parent), os.W_OK):
            sys.exit(f"{VENV} cannot be created or changed here: set COURSE_VENV to a folder of your own.")
        sys.exit(f"The environment is not finished ({error!r}): run this again.")
    command = sys.argv[1:] or ["-c", "import sys; print('The environment is ready:', sys.prefix)"]
    os.environ.update(PATH=f"{VENV}/bin:{os.environ['PATH']}", PYTHONPATH=str(ROOT))
    os.environ.setdefault("PYTHONIOENCODING", ":replace")  # A terminal may lack characters that the course prints.
    os.set_inheritable(mark.fileno(), True)
    os.execv(str(PYTHON), [str(PYTHON), *command])


if __name__ == "__main__":
    main()
