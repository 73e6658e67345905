"""Run the command line as `python -m pyrofl`."""

from __future__ import annotations

import sys

from pyrofl.cli.parser import main

if __name__ == "__main__":
    sys.exit(main())
