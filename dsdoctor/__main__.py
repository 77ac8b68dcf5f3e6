"""`python -m dsdoctor` is the `dsdoctor` command."""

import sys

from dsdoctor.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
