"""`python -m dflash` is the console script."""

import sys

from dflash.cli import main

if __name__ == "__main__":
    sys.exit(main())
