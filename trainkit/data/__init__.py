"""Datasets, sample order, sharding over ranks, and the loaders that read step batches."""
