"""Step time, memory and bytes of tensor parallelism on two CPU ranks, by trainkit and by a hand-written loop.

    trainkit       strategy fsdp with tensor_parallel=2, the task unchanged
    hand-written   torch's parallelize_module with ColwiseParallel and RowwiseParallel, activations local in between
    one process    the same task on one rank with one thread

Contenders run in turn; the ratio is that of medians of each round.

    python benchmarks/tensor_parallel.py --rounds 5
"""

from __future__ import annotations

import argparse
import time
import warnings
from collections.abc import Callable
from statistics import median, quantiles
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn import functional
from trainkit.strategies.fsdp.strategy import FSDPStrategy
from trainkit.strategies.single import SingleStrategy

from trainkit import TaskModule
from trainkit.data.batch import MicroBatch, StepBatch
from trainkit.loops.fit_loop import make_phase_step
from trainkit.optim.optimizer import GradientClipping, configure_optimizers
from trainkit.optim.precision import Precision
from trainkit.testing import run_ranks

STEPS, WARM_UP = 12, 4
SIZES = {"width 256, 4 blocks": (256, 4, 128), "width 768, 4 blocks": (768, 4, 256)}  # width, blocks, tokens
SAMPLES, HEAD = 4, 64


class Block(nn.Module):
    """Attention and a network of two layers, both residual."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.network_norm = nn.LayerNorm(width), nn.LayerNorm(width)
        self.query, self.key, self.value, self.output = (nn.Linear(width, width) for _ in range(4))
        self.widen, self.shrink = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        """Return features of the shape of `x`, (samples, tokens, width)."""
        normed = self.norm(x)
        parts = (layer(normed).unflatten(2, (-1, HEAD)).transpose(1, 2) for layer in (self.query, self.key, self.value))
        attended = functional.scaled_dot_product_attention(*parts, is_causal=True)
        x = x + self.output(attended.transpose(1, 2).flatten(2))
        return x + self.shrink(functional.gelu(self.widen(self.network_norm(x))))


class Stack(TaskModule):
    """Blocks, and a loss of their outputs."""

    def __init__(self, width: int, depth: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(width) for _ in range(depth))

    def training_step(self, batch: Any) -> Tensor:
        for block in self.blocks:
            batch = block(batch)
        return batch.square().mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


def by_trainkit(task: Stack, batch: Tensor, strategy: Any) -> tuple[Callable[[], Any], Callable[[], int], Any]:
    """Return a step, the bytes of parameters on this rank, and what ends the training."""
    strategy.setup(Precision("fp32"))
    strategy.prepare(task)
    clip = GradientClipping(norm=1.0)
    (phase_optimizer,) = configure_optimizers(
        task, clip=clip, precision=strategy.precision, total_steps=100, fused=False, skip=False
    )
    strategy.prepare_optimizer(task, phase_optimizer)
    make_phase_step(task, strategy, phase_optimizer)
    step_batch = StepBatch([MicroBatch(batch, len(batch))], len(batch), len(batch), False)

    def step() -> None:
        strategy.forward_backward(task, step_batch)
        strategy.optimizer_step(phase_optimizer)

    def num_bytes() -> int:
        return sum(parameter.nbytes for parameter in phase_optimizer.parameters)

    return step, num_bytes, strategy.teardown


def by_hand(task: Stack, batch: Tensor) -> tuple[Callable[[], Any], Callable[[], int], Any]:
    """Return the same of a loop over torch's parallel styles."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    plan: Any = dict.fromkeys(("query", "key", "value", "widen"), ColwiseParallel())
    plan |= dict.fromkeys(("output", "shrink"), RowwiseParallel())
    for block in task.blocks:
        parallelize_module(block, mesh, plan)
    optimizer = torch.optim.AdamW(task.parameters(), lr=1e-3)

    def step() -> None:
        task.training_step(batch).backward()
        nn.utils.clip_grad_norm_(
            [parameter for parameter in task.parameters() if not hasattr(parameter, "placements")], 1.0
        )
        nn.utils.clip_grad_norm_([p for p in task.parameters() if hasattr(p, "placements")], 1.0)
        optimizer.step()
        optimizer.zero_grad()

    def num_bytes() -> int:
        return sum(getattr(parameter, "_local_tensor", parameter).nbytes for parameter in task.parameters())

    return step, num_bytes, lambda: None


def measured(contender: str, size: str) -> tuple[float, int]:
    """Return the median seconds of a step, and the bytes of a rank's parameters."""
    warnings.simplefilter("ignore")
    width, depth, tokens = SIZES[size]
    torch.manual_seed(0)
    task, batch = Stack(width, depth), torch.randn(SAMPLES, tokens, width)
    if contender == "hand-written":
        step, num_bytes, end = by_hand(task, batch)
    else:
        strategy = (
            FSDPStrategy(device="cpu", tensor_parallel=2) if contender == "trainkit" else SingleStrategy(device="cpu")
        )
        step, num_bytes, end = by_trainkit(task, batch, strategy)
    seconds = []
    for _ in range(WARM_UP):
        step()
    for _ in range(STEPS):
        start = time.perf_counter()
        step()
        seconds.append(time.perf_counter() - start)
    size_of_rank = num_bytes()
    end()
    return median(seconds), size_of_rank


def main() -> None:
    """Print a table for each size."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    arguments = parser.parse_args()
    print("model | hand-written, ms | trainkit / hand-written | one process / trainkit | share of parameters of a rank")
    for size in SIZES:
        rounds = []
        for number in range(arguments.rounds):
            order = ["trainkit", "hand-written", "one process"]
            order = order[number % 3 :] + order[: number % 3]
            rounds.append({c: run_ranks(measured, 1 if c == "one process" else 2, c, size)[0] for c in order})
        ratios = [each["trainkit"][0] / each["hand-written"][0] for each in rounds]
        speed_ups = [each["one process"][0] / each["trainkit"][0] for each in rounds]
        low, middle, high = quantiles(ratios, n=4)
        share = rounds[0]["trainkit"][1] / rounds[0]["one process"][1]
        milliseconds = 1000 * median(each["hand-written"][0] for each in rounds)
        ratio = f"{middle:.2f} ({low:.2f} to {high:.2f})"
        print(f"{size} | {milliseconds:.0f} | {ratio} | {median(speed_ups):.2f} | {share:.3f}", flush=True)


if __name__ == "__main__":
    main()
