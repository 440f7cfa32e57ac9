"""The strategy `fsdp`: parameters, gradients and optimizer state in shards, over PyTorch's `fully_shard`."""
