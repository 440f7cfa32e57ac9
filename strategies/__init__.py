"""Strategies: one module or package each, which does the work of a step on its devices."""
