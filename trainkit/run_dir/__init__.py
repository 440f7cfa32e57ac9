"""The folder of a run: lock, config, failures, summary, and which run to resume."""
