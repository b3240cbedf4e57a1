"""python -m shared.hosts: make one host and release it. The exit status says whether this machine can make hosts."""

import sys

from shared import hosts

if __name__ == "__main__":
    try:
        hosts.build(1, hosts._MAX_RATE)
    except OSError as error:
        sys.exit(str(error))
