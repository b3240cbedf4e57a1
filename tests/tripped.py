"""Run pieces of code as a rank of the grader would, each in a process of its own: `python -m tests.tripped CASES.json`.

The cases are a dictionary of names and function bodies. Prints a dictionary of exit statuses and of what was printed.
"""

import json
import os
import sys
import tempfile
import textwrap
import traceback
from pathlib import Path

import ipyparallel.engine.app  # noqa: F401 (Each rank has loaded these modules.)
import torch._dynamo  # noqa: F401

import shared.checks.manual_ddp  # noqa: F401
from instructor.grade import tripwire
from shared.checks.engine import candidate
from shared.wire import instrumentation

TOP = "import torch\nimport torch.distributed as dist\nimport sys\nimport shared.wire\n\ndef run():\n"


def main(cases: str) -> None:
    instrumentation.install()
    found = {name: _run(body) for name, body in json.loads(Path(cases).read_text()).items()}
    print(json.dumps(found))


def _run(body: str) -> tuple[int, str]:
    """Return the exit status of a rank that runs this body, and the end of what it printed."""
    with tempfile.TemporaryDirectory() as folder, tempfile.TemporaryFile() as printed:
        path = Path(folder, "candidate.py")
        path.write_text(TOP + textwrap.indent(textwrap.dedent(body).strip(), "    "))
        pid = os.fork()
        if pid == 0:
            os.dup2(printed.fileno(), 1)
            os.dup2(printed.fileno(), 2)
            _as_a_rank(str(path))
        _, status = os.waitpid(pid, 0)
        printed.seek(0)
        return os.waitstatus_to_exitcode(status), printed.read().decode(errors="replace")[-1000:]


def _as_a_rank(path: str) -> None:
    try:
        candidate.given["__builtins__"] = tripwire.builtins_for_students()
        tripwire.install(())
        with instrumentation.listening():
            # IPython calls the probe in this way, too.
            exec("print('returned', module.run())", {"module": candidate._load(path)})
        status = 0
    except BaseException:
        traceback.print_exc()
        status = 1
    sys.stdout.flush()
    os._exit(status)


if __name__ == "__main__":
    main(sys.argv[1])
