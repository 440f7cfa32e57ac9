"""Where the work of a step is done: one module or sub-package for each strategy."""
