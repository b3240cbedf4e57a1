"""python -m shared.hosts: make one host and let it go; the exit status says whether this machine can."""

import sys

from shared import hosts

if __name__ == "__main__":
    try:
        hosts.build(1, hosts._FASTEST)
    except OSError as refused:
        sys.exit(str(refused))
