"""One process a device: gradients are averaged by our own bucketed Reducer while backward runs."""
