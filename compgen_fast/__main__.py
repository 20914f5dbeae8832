"""`python -m compgen_fast` is `cgf`, for where no script is on PATH."""

import sys

from compgen_fast.cli import main

if __name__ == "__main__":
    sys.exit(main())
