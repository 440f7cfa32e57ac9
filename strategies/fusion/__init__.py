"""Balanced fusion buffers: every rank is a server that sums an equal shard of all gradients."""

from .strategy import FusionStrategy

__all__ = ["FusionStrategy"]
