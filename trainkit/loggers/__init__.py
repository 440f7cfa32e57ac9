"""Loggers: one file for each destination."""
