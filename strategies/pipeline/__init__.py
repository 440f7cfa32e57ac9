"""One task over several devices: recorded, cut into stages, and run by a schedule of micro-batches."""
