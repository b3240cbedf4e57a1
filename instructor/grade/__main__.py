"""Start the grader so that Ctrl-C ends it without a traceback, even during the seconds in which torch is imported."""

import signal
import sys

if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    from instructor.grade.command import main

    signal.signal(signal.SIGINT, signal.default_int_handler)
    sys.exit(main())
