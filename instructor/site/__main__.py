import sys

from instructor.site.command import main

if __name__ == "__main__":
    sys.exit(main())
