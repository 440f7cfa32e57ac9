"""Step time under every strategy on the ranks of this machine, and the balance of the servers' work.

    python benchmarks/strategies.py                        2 ranks, all models
    python benchmarks/strategies.py --ranks 4 --models mlp_5m --rounds 20
    python benchmarks/strategies.py --device cuda          2 ranks that share a GPU, over gloo

All strategies live in the same processes and take turns, some steps at a time, so that other load on the machine
affects all of them equally. Times are medians over rounds of the slowest rank; `vs stock` compares with PyTorch's own
DistributedDataParallel over gloo, with the same fused AdamW.
"""

from __future__ import annotations

import argparse
import copy
import json
import statistics
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional
from trainkit.strategies.ddp.strategy import DDPStrategy
from trainkit.strategies.dp.strategy import DataParallelStrategy
from trainkit.strategies.fusion.strategy import FusionStrategy
from trainkit.strategies.single import SingleStrategy
from trainkit.strategies.torch_ddp import TorchDDPStrategy

from trainkit import TaskModule
from trainkit.data.batch import MicroBatch, StepBatch
from trainkit.devices import synchronize
from trainkit.optim.optimizer import GradientClipping, configure_optimizers
from trainkit.optim.precision import Precision
from trainkit.strategy import Strategy
from trainkit.testing import run_ranks
from trainkit.tree import to_device

STOCK = "torch_ddp"
STEPS_OF_A_TURN = 4
WARM_UP_ROUNDS = 2
STRATEGIES: dict[str, Callable[[str], Strategy]] = {
    "torch_ddp": lambda device: TorchDDPStrategy(device=device),
    "ddp": lambda device: DDPStrategy(device=device, record_timeline=True),
    "ddp group": lambda device: DDPStrategy(device=device, transport="process_group", record_timeline=True),
    "fusion": lambda device: FusionStrategy(device=device, record_timeline=True),
    "fusion thread": lambda device: FusionStrategy(device=device, communication_thread=True, record_timeline=True),
    "fusion bf16": lambda device: FusionStrategy(device=device, reduce_dtype="bf16", record_timeline=True),
    "fusion sharded": lambda device: FusionStrategy(device=device, shard_optimizer=True, record_timeline=True),
    "fusion sharded thread": lambda device: FusionStrategy(
        device=device, shard_optimizer=True, communication_thread=True, record_timeline=True
    ),
    "fusion exchange thread": lambda device: FusionStrategy(
        device=device, transport="exchange", communication_thread=True, record_timeline=True
    ),
    "fusion exchange": lambda device: FusionStrategy(device=device, transport="exchange", record_timeline=True),
}
ON_ONE_PROCESS: dict[str, Callable[[str, int], Strategy]] = {
    "single": lambda device, ranks: SingleStrategy(device=device, accumulate=ranks),
    "dp": lambda device, ranks: DataParallelStrategy(devices=[device] * ranks),
}


class MLP(TaskModule):
    """Five layers of one width."""

    def __init__(self, width: int) -> None:
        super().__init__()
        layers = [layer for _ in range(5) for layer in (nn.Linear(width, width), nn.GELU())]
        self.network = nn.Sequential(*layers)
        self.width = width

    def training_step(self, batch: Any) -> Tensor:
        """Return the mean square of the outputs."""
        loss: Tensor = self.network(batch).square().mean()
        return loss

    def batch(self, num_samples: int) -> Tensor:
        """Return random inputs."""
        return torch.randn(num_samples, self.width)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Return AdamW."""
        return torch.optim.AdamW(self.parameters(), lr=1e-4)


class GPT(TaskModule):
    """A small language model of about four million parameters: many small ones and two large ones."""

    def __init__(self) -> None:
        super().__init__()
        width, vocabulary = 192, 4096
        self.vocabulary = vocabulary
        self.tokens = nn.Embedding(vocabulary, width)
        layer = nn.TransformerEncoderLayer(width, 4, 4 * width, dropout=0.0, batch_first=True, norm_first=True)
        self.blocks = nn.TransformerEncoder(layer, 6, enable_nested_tensor=False)
        self.head = nn.Linear(width, vocabulary, bias=False)

    def training_step(self, batch: Any) -> Tensor:
        """Return the loss of the next token."""
        inputs, targets = batch[:, :-1], batch[:, 1:]
        mask = nn.Transformer.generate_square_subsequent_mask(inputs.shape[1])
        logits = self.head(self.blocks(self.tokens(inputs), mask=mask, is_causal=True))
        return functional.cross_entropy(logits.flatten(0, 1), targets.flatten())

    def batch(self, num_samples: int) -> Tensor:
        """Return random tokens."""
        return torch.randint(0, self.vocabulary, (num_samples, 33))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Return AdamW."""
        return torch.optim.AdamW(self.parameters(), lr=1e-4)


MODELS: dict[str, tuple[Callable[[], Any], int]] = {  # and samples of a rank in a step
    "mlp_5m": (lambda: MLP(1000), 32),
    "gpt_4m": (GPT, 4),
    "mlp_60m": (lambda: MLP(3464), 32),
}


class Runner:
    """One strategy with its own copy of the task, ready to make steps."""

    def __init__(self, strategy: Strategy, task: Any, *, num_samples: int) -> None:
        self.strategy, self.task = strategy, copy.deepcopy(task)
        strategy.setup(Precision())
        plan = strategy.plan(num_samples)
        mine = num_samples // strategy.comm.world_size
        sizes = [min(plan.micro_batch_size, mine - start) for start in range(0, mine, plan.micro_batch_size)]
        self.step_batch = StepBatch(
            [MicroBatch(to_device(self.task.batch(size), strategy.device), size) for size in sizes],
            num_samples,
            num_samples,
            False,
        )
        strategy.prepare(self.task)
        (self.phase_optimizer,) = configure_optimizers(
            self.task, clip=GradientClipping(), precision=strategy.precision, total_steps=None, fused=True, skip=False
        )
        strategy.prepare_optimizer(self.task, self.phase_optimizer)

    def step(self) -> None:
        """Make one step."""
        self.strategy.forward_backward(self.task, self.step_batch)
        self.strategy.optimizer_step(self.phase_optimizer)

    def seconds_a_step(self) -> float:
        """Return the time of a step, measured over one turn."""
        started = time.perf_counter()
        for _ in range(STEPS_OF_A_TURN):
            self.step()
        synchronize(self.strategy.device)
        return (time.perf_counter() - started) / STEPS_OF_A_TURN


def measure(strategies: dict[str, Callable[[], Strategy]], model: str, num_samples: int, rounds: int) -> Any:
    """Return the seconds of a step in each round, the bytes of a step and what hides behind backward, by strategy."""
    torch.manual_seed(dist.get_rank() if dist.is_initialized() else 0)
    task = MODELS[model][0]()
    runners = {name: Runner(make(), task, num_samples=num_samples) for name, make in strategies.items()}
    seconds: dict[str, list[float]] = {name: [] for name in runners}
    for round_number in range(rounds + WARM_UP_ROUNDS):
        for name, runner in runners.items():
            if dist.is_initialized():
                dist.barrier()
            taken = runner.seconds_a_step()
            if round_number >= WARM_UP_ROUNDS:
                seconds[name].append(taken)
    sent = {name: getattr(runner.strategy, "bytes_a_step", None) for name, runner in runners.items()}
    hidden = {}
    for name, runner in runners.items():
        timeline = getattr(runner.strategy, "timeline", None)
        hidden[name] = None if timeline is None else timeline.hidden_share
        runner.strategy.teardown()
    return seconds, sent, hidden


def measure_on_rank(names: list[str], model: str, device: str, num_samples: int, rounds: int) -> Any:
    """Measure the strategies of several processes on this rank."""
    return measure({name: partial(STRATEGIES[name], device) for name in names}, model, num_samples, rounds)


def compare(
    names: list[str], model: str, *, device: str, ranks: int, rounds: int
) -> dict[str, dict[str, float | None]]:
    """Return for each strategy the median time of a step and its ratio to stock DDP."""
    num_samples = ranks * MODELS[model][1]
    several = [name for name in names if name in STRATEGIES]
    outcomes = run_ranks(measure_on_rank, ranks, several, model, device, num_samples, rounds, timeout=1200)
    seconds: dict[str, list[float]] = {}
    for name in several:
        of_ranks = [outcome[0][name] for outcome in outcomes]
        seconds[name] = [max(of_round) for of_round in zip(*of_ranks, strict=True)]
    sent: dict[str, int | None] = outcomes[0][1]
    hidden: dict[str, float | None] = outcomes[0][2]
    alone = {name: partial(make, device, ranks) for name, make in ON_ONE_PROCESS.items() if name in names}
    if alone:
        seconds.update(measure(alone, model, num_samples, max(2, rounds // 2))[0])
    stock = statistics.median(seconds[STOCK]) if STOCK in seconds else None
    return {
        name: {
            "milliseconds": 1000 * statistics.median(seconds[name]),
            "vs_stock": statistics.median(seconds[name]) / stock if stock else None,
            "megabytes": None if sent.get(name) is None else (sent[name] or 0) / 1e6,
            "hidden_share": hidden.get(name),
        }
        for name in names
    }


class Lopsided(TaskModule):
    """A model with one huge and many tiny parameters."""

    sizes = (4_000_000, *[1000] * 500)

    def __init__(self) -> None:
        super().__init__()
        self.variables = nn.ParameterList([nn.Parameter(torch.ones(size)) for size in self.sizes])

    def training_step(self, batch: Any) -> Tensor:
        return torch.stack([variable.square().mean() for variable in self.variables]).sum() * batch.mean()

    def batch(self, num_samples: int) -> Tensor:
        return torch.ones(num_samples, 1)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def bytes_of_a_step() -> list[int]:
    """Return the bytes that this rank moves in a step of the lopsided model, for each transport of fusion."""
    found = []
    for transport in ("shared_memory", "exchange"):
        runner = Runner(FusionStrategy(device="cpu", transport=transport), Lopsided(), num_samples=8)
        runner.seconds_a_step()
        found.append(runner.strategy.bytes_a_step)
        runner.strategy.teardown()
    return found


def naive_bytes_per_server(variables: Sequence[int], world_size: int) -> list[int]:
    """Return the servers' loads if variables stay whole: the largest first, each to the least loaded server."""
    loads = [0] * world_size
    for size in sorted(variables, reverse=True):
        loads[loads.index(min(loads))] += size
    return loads


def imbalance(loads: Sequence[int]) -> float:
    """Return the load of the busiest server divided by the mean load."""
    return max(loads) * len(loads) / sum(loads)


def server_balance(ranks: int) -> dict[str, float]:
    """Return the busiest server's load relative to the mean: as transports count bytes, and with whole variables."""
    shared_memory, exchange = zip(*run_ranks(bytes_of_a_step, ranks), strict=True)
    return {
        "parts in shared memory": imbalance(shared_memory),
        "parts through gloo": imbalance(exchange),
        "whole variables": imbalance(naive_bytes_per_server(Lopsided.sizes, ranks)),
    }


def main() -> None:
    """Print a table for each model, and the servers' balance."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--models", nargs="+", default=list(MODELS), choices=list(MODELS))
    parser.add_argument("--strategies", nargs="+", default=[*STRATEGIES, *ON_ONE_PROCESS])
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--json", action="store_true")
    typed = parser.parse_args()
    torch.set_num_threads(1)
    found: dict[str, Any] = {}
    for model in typed.models:
        found[model] = compare(typed.strategies, model, device=typed.device, ranks=typed.ranks, rounds=typed.rounds)
        if not typed.json:
            show(f"{model}, {typed.ranks} ranks", found[model])
    found["server balance"] = server_balance(typed.ranks)
    if typed.json:
        print(json.dumps(found, indent=2))
        return
    for kind, load in found["server balance"].items():
        print(f"busiest of {typed.ranks} servers with {kind}: {load:.4f} times the mean")


def show(title: str, rows: dict[str, dict[str, float | None]]) -> None:
    """Print one model's table."""
    print(title)
    print(f"  {'strategy':<16} {'ms a step':>10} {'vs stock':>9} {'MB a step':>10} {'hidden':>7}")
    for name, row in rows.items():
        ratio = "" if row["vs_stock"] is None else f"{row['vs_stock']:.2f}"
        sent = "" if row["megabytes"] is None else f"{row['megabytes']:.1f}"
        hidden = "" if row["hidden_share"] is None else f"{100 * row['hidden_share']:.0f} %"
        print(f"  {name:<16} {row['milliseconds']:>10.2f} {ratio:>9} {sent:>10} {hidden:>7}")


if __name__ == "__main__":
    main()
