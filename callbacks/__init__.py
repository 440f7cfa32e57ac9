"""Callbacks that come with trainkit: one idea a file."""
