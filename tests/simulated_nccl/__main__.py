"""Run every check on every solution and variant under simulated NCCL: python -m tests.simulated_nccl [NAME …].

Even `make test ALL=1` runs only a part of this, because it takes about 20 minutes. A NAME is a part of `folder-file`,
such as `04_overlap` or `solutions-zero3`. The exit status is 0 if no check fails.
"""

import contextlib
import io
import sys
import time

from shared import ranks
from tests.simulated_nccl.accepted import checked_files, failures_of, name_of


def main(names: list[str]) -> int:
    """Check the files whose name contains one of these names, or all files."""
    failed = []
    with contextlib.redirect_stdout(io.StringIO()):
        ranks.start(4, backend="gloo:cpu", simulate="nccl", detect_mismatch=False)
    try:
        for module, path in checked_files():
            if names and not any(name in name_of(path) for name in names):
                continue
            began_s = time.monotonic()
            failures = failures_of(module, path)
            print(f"{name_of(path)}: {len(failures)} failed, {time.monotonic() - began_s:.0f} s", flush=True)
            print("".join(f"  {failure}\n" for failure in failures), end="", flush=True)
            failed += failures
    finally:
        ranks.stop()
    print(f"{len(failed)} checks failed")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
