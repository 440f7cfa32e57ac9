"""Pipeline parallelism: one task over several devices, traced, partitioned into stages and run by a schedule."""
