"""Trace: the calls of a step as a graph."""
