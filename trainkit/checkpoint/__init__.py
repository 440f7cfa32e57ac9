"""Checkpoints in files that a kill at any instant leaves readable."""
