"""Marks of tests that run with `make zoo`, and not with `make test-all`."""

import os

import pytest

EVERY_CASE = os.environ.get("TRAINKIT_ZOO") == "all"
"""True in `make zoo`, which holds tasks against one process in more ways than all other tests together."""
in_make_zoo = pytest.mark.skipif(not EVERY_CASE, reason="`make zoo` runs it")
