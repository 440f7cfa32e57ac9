"""Optimizers, their phases and gradients that are not finite."""
