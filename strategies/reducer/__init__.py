"""Gradients in buckets, reduced while backward runs."""
