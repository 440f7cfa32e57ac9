"""Sums of flat tensors over ranks: through the process group, in shared memory, between hosts, by shards."""
