"""Run: the ranks, their stages, and what these send to each other."""
