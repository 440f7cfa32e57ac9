"""`python -m trainkit` and the script `trainkit`."""

from __future__ import annotations

import sys


def main() -> int:
    """Run the command that was typed and return its exit code."""
    from trainkit.cli.main import main as run

    return run()


# Processes that a strategy starts import this module too, under another name.
if __name__ == "__main__":
    sys.exit(main())
