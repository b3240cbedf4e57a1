"""Start the grader so that Ctrl-C ends it without a traceback, even during the seconds in which torch is imported."""

import signal
import sys

from instructor.grade import unchanged

if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    options = unchanged.parser().parse_args()
    if unchanged.is_unchanged(options):
        print(f"Nothing has changed since everything was graded. See {options.into}/index.html.")
        sys.exit(0)
    from instructor.grade.command import main

    signal.signal(signal.SIGINT, signal.default_int_handler)
    sys.exit(main())
