"""Run the command line as `python -m pyrofl`."""

import sys

from pyrofl.cli import main

if __name__ == "__main__":
    sys.exit(main())
