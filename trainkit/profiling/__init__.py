"""Profiling: what happened when on which track, and how much memory it took."""
