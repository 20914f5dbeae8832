"""The command `cgf`; `python -m compgen_fast` where no script is on PATH."""

import sys

from compgen_fast.exits import ended_by_ctrl_c

with ended_by_ctrl_c():
    from compgen_fast.cli import main

if __name__ == "__main__":
    sys.exit(main())
