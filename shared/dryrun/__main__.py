"""python -m shared.dryrun: see `shared/dryrun/__init__.py`."""

import sys

from shared.dryrun import main

if __name__ == "__main__":
    sys.exit(main())
