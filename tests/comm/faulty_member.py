"""`python -m tests.comm.faulty_member ARGS`: dsdoctor's own command whose rank has the fault that COMM_FAULT names.

The faults are those of `faulty_rank`; the process beside the rank is the real one, and the rank is forked from it.
"""

import os
import sys

from dsdoctor.cli.main import main
from tests.comm import faulty_rank

if __name__ == "__main__":
    kind, _, wanted = os.environ.get("COMM_FAULT", "").partition(":")
    if kind and wanted == os.environ["RANK"]:
        getattr(faulty_rank, kind)()
    sys.exit(main())
