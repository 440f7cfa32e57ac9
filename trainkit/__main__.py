"""`python -m trainkit` and the script `trainkit`."""

from __future__ import annotations

import sys

from trainkit.cli.main import main

# Processes that a strategy starts import this module too, under another name.
if __name__ == "__main__":
    sys.exit(main())
