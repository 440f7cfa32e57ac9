"""One process, several devices: a master scatters, replicates, gathers and sums."""

from .strategy import DataParallelStrategy

__all__ = ["DataParallelStrategy"]
