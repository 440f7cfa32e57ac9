"""Hydra config groups: the defaults of every constructor, by name."""
