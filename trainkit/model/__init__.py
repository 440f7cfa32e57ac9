"""Changes to a model before training, its graph and its FLOPs."""
