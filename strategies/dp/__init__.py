"""One process, several devices: a master scatters, replicates, gathers and sums."""

from .strategy import DataParallel

__all__ = ["DataParallel"]
