"""Reading an iterable dataset with shards: ranks and workers that divide it, against one worker that reads all.

    python benchmarks/data.py [--shards 8] [--samples 128] [--wait-ms 2] [--batch 16] [--rounds 5]

Each sample costs a wait, as a download would, or with `--wait-ms 0` the decompression of half a megabyte. No model is
trained: a rank reads its shard of each global batch and waits for the others, as a step does. `whole` is the same
dataset without shards, which every rank reads with one worker. A round runs each contender once, in rotating order; the
table shows medians of samples per second over all ranks, with quartiles. The start of the workers is included.
"""

from __future__ import annotations

import argparse
import statistics
import time
import zlib
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch.utils.data import IterableDataset
from trainkit.strategies.single import SingleStrategy

from trainkit import Data
from trainkit.data.loader import open_loader
from trainkit.distributed.collectives import Collectives
from trainkit.testing import run_ranks

PACKED = zlib.compress(bytes(1 << 19))
CONTENDERS = {  # ranks, workers of each rank, with shards
    "whole, 1 rank x 1 worker": (1, 1, False),
    "whole, 2 ranks x 1 worker": (2, 1, False),
    "shards, 1 rank x 1 worker": (1, 1, True),
    "shards, 1 rank x 2 workers": (1, 2, True),
    "shards, 2 ranks x 1 worker": (2, 1, True),
    "shards, 2 ranks x 2 workers": (2, 2, True),
}


class Slow(IterableDataset[int]):
    """Samples that take time to read, from some of the shards."""

    def __init__(self, shards: range, samples: int, wait_ms: float) -> None:
        self.shards, self.samples, self.wait_ms = shards, samples, wait_ms

    def __iter__(self) -> Iterator[int]:
        for shard in self.shards:
            for number in range(self.samples):
                if self.wait_ms:
                    time.sleep(self.wait_ms / 1000)
                else:
                    zlib.decompress(PACKED)
                yield shard * self.samples + number


class SlowShards(Slow):
    """The same samples with shards."""

    @property
    def num_shards(self) -> int:
        return len(self.shards)

    def shard(self, num_shards: int, index: int) -> Slow:
        return Slow(self.shards[index::num_shards], self.samples, self.wait_ms)


class Gathering(Collectives):
    """The collective that a loader uses, over the process group of the benchmark."""

    def all_gather_object(self, value: Any) -> list[Any]:
        values: list[Any] = [None] * self.world_size
        dist.all_gather_object(values, value)
        return values


def read(workers: int, with_shards: bool, options: argparse.Namespace) -> tuple[float, int]:
    """Return the seconds in which this rank read an epoch, and its number of samples."""
    kind = SlowShards if with_shards else Slow
    dataset = kind(range(options.shards), options.samples, options.wait_ms)
    strategy = SingleStrategy(device="cpu")
    strategy.comm = Gathering(rank=dist.get_rank(), world_size=dist.get_world_size())
    data = Data(train=dataset, batch_size=options.batch, num_workers=workers)
    loader = open_loader(data.stage_data("train"), strategy, seed=0)
    dist.barrier()
    began, count = time.perf_counter(), 0
    for step_batch in loader.step_batches(0, 0):
        count += sum(micro_batch.num_samples for micro_batch in step_batch.micro_batches)
        dist.all_reduce(torch.zeros(1))  # as a step waits for the slowest rank
    return time.perf_counter() - began, count


def main() -> None:
    """Measure all contenders and print one table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shards", type=int, default=8)
    parser.add_argument("--samples", type=int, default=128, help="of each shard")
    parser.add_argument("--wait-ms", type=float, default=2.0, help="for each sample; 0 decompresses instead")
    parser.add_argument("--batch", type=int, default=16, help="samples of a global batch")
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    rates: dict[str, list[float]] = {name: [] for name in CONTENDERS}
    for number in range(options.rounds):
        names = list(CONTENDERS)
        for name in names[number % len(names) :] + names[: number % len(names)]:
            ranks, workers, with_shards = CONTENDERS[name]
            results = run_ranks(read, ranks, workers, with_shards, options)
            trained = sum(count for _, count in results)
            assert trained == options.shards * options.samples, "each sample is trained on once"
            rates[name].append(trained / max(seconds for seconds, _ in results))
    base = rates["whole, 1 rank x 1 worker"]
    print("| contender | samples/s (quartiles) | of one worker |\n|---|---|---|")
    for name, values in rates.items():
        low, middle, high = statistics.quantiles(values, n=4, method="inclusive") if len(values) > 1 else values * 3
        ratio = statistics.median(value / one for value, one in zip(values, base, strict=True))
        print(f"| {name} | {middle:.0f} ({low:.0f} to {high:.0f}) | {ratio:.2f} |")


if __name__ == "__main__":
    main()
