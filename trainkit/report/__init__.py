"""Reports of runs: one HTML file that needs nothing else to be read."""
