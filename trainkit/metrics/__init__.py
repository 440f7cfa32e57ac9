"""Metrics: what steps return, accumulated over steps and ranks."""
