"""Step times of our Reducer against PyTorch's DistributedDataParallel, on two processes of this machine.

    python benchmarks/ddp_step.py [--rounds 20] [--models mlp5,gpt4,mlp60] [--fit | --memory]

With `--fit` the whole `Trainer.fit`, default callbacks and loggers included, against a hand-written loop; with
`--memory` what gradients cost: memory of the process (its proportional share of what it shares) after a backward, less
that before the wrapper was made, over the bytes of one set of gradients. Memory that is freed is given back at once.

All contenders live in the same two processes, are visited once in each round in rotating order, and a sample is the
slower rank's time. The table gives the median of the ratios within rounds, with quartiles; the same for the time of
the processor, which a busy machine disturbs less. The last line is JSON.

For all of them the C library keeps memory that is freed: it would give back some of the large gradients after each
step, or not, by the luck of where they lie, and each costs thousands of page faults when it comes again.
"""

from __future__ import annotations

import argparse
import copy
import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as StockDDP
from torch.utils.data import TensorDataset
from trainkit.strategies.ddp import DDPStrategy
from trainkit.strategies.reducer.reducer import Reducer, ReducerSettings
from trainkit.strategies.transports.selection import open_transport

from trainkit import Callback, Data, TaskModule, Trainer
from trainkit.testing import run_ranks

NAMES = (
    "no communication",
    "one number",  # summed over ranks after each backward: what it costs to wait for each other
    "stock",
    "stock, best",
    "ours, gloo",
    "ours, gloo, no small",  # no small first bucket: one call less, worth it where all cores compute
    "ours, shared memory",
    "drop-in, gloo",
)
BEST = "stock, best"  # gradient_as_bucket_view and static_graph
WARM_UP = 4
BOOKKEEPING_PARAMETERS = 400
SEGMENT = 50  # steps of Trainer.fit between two turns of the hand-written loop: one line of the log in each


class Block(nn.Module):
    """One transformer block."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm_1, self.norm_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:  # (B, T, C)
        batch, length, width = x.shape
        q, k, v = self.qkv(self.norm_1(x)).view(batch, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        mixed = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, length, width))
        return x + self.down(nn.functional.gelu(self.up(self.norm_2(x))))


class Gpt(nn.Module):
    """4 million parameters in 148 tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(2048, 160), nn.Embedding(32, 160)
        self.blocks = nn.Sequential(*(Block(160, 4) for _ in range(12)))
        self.norm = nn.LayerNorm(160)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.tokens(ids) + self.positions.weight
        return self.norm(self.blocks(x)) @ self.tokens.weight.t()


def mlp(width: int, depth: int) -> nn.Sequential:
    layers: list[nn.Module] = []
    for _ in range(depth):
        layers += [nn.Linear(width, width), nn.ReLU()]
    return nn.Sequential(*layers[:-1])


MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[], Tensor], int]] = {
    # model, input, steps in a sample
    "mlp5": (lambda: mlp(710, 10), lambda: torch.randn(32, 710), 3),
    "gpt4": (Gpt, lambda: torch.randint(0, 2048, (4, 32)), 2),
    "mlp60": (lambda: mlp(2700, 8), lambda: torch.randn(16, 2700), 1),
}


class Contender:
    """One way to train a copy of the model."""

    def __init__(self, name: str, model: nn.Module) -> None:
        self.model = model
        self.wrapped: nn.Module = model
        self.reducer: Reducer | None = None
        self.number = torch.zeros(1) if name == "one number" else None
        if name == "stock":
            self.wrapped = StockDDP(model)
        elif name == BEST:
            self.wrapped = StockDDP(model, gradient_as_bucket_view=True, static_graph=True)
        elif name == "drop-in, gloo":
            from trainkit.strategies.ddp import DistributedDataParallel

            self.wrapped = DistributedDataParallel(
                model, gradient_as_bucket_view=True, static_graph=True, transport="process_group"
            )
        elif name.startswith("ours"):
            settings = ReducerSettings(average=False, first_bucket_cap_mb=25.0 if name.endswith("no small") else 1.0)
            opened = partial(open_transport, name="process_group" if "gloo" in name else "shared_memory")
            group = dist.group.WORLD
            assert group is not None
            self.reducer = Reducer(
                list(model.named_parameters()), group=group, settings=settings, open_transport=opened
            )
        self.share = 1.0 / dist.get_world_size() if self.reducer is not None else 1.0
        self.optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, fused=True)

    def step(self, x: Tensor) -> None:
        with nullcontext() if self.reducer is None else self.reducer.session():
            loss = self.wrapped(x).square().mean()
            (loss * self.share).backward()
        if self.number is not None:
            dist.all_reduce(self.number)
        self.optimizer.step()
        self.optimizer.zero_grad()


def compare(model: str, rounds: int) -> dict[str, list[tuple[float, float]]]:
    """Return for each contender the seconds of a step in each round, of the clock and of the processor."""
    make, make_input, steps = MODELS[model]
    torch.manual_seed(0)
    start = make()
    contenders = {name: Contender(name, copy.deepcopy(start)) for name in NAMES}
    x = make_input()
    for contender in contenders.values():
        for _ in range(WARM_UP):
            contender.step(x)
    seconds: dict[str, list[tuple[float, float]]] = {name: [] for name in NAMES}
    for turn in range(rounds):
        for offset in range(len(NAMES)):
            name = NAMES[(turn + offset) % len(NAMES)]
            contenders[name].step(x)  # brings its own memory into the cache
            dist.barrier()
            begin, begin_cpu = time.perf_counter(), time.process_time()
            for _ in range(steps):
                contenders[name].step(x)
            taken = [time.perf_counter() - begin, time.process_time() - begin_cpu]
            slower = torch.tensor(taken, dtype=torch.float64) / steps
            dist.all_reduce(slower, dist.ReduceOp.MAX)
            wall, processor = slower.tolist()
            seconds[name].append((wall, processor))
    return seconds


class Squares(TaskModule):
    """One of the models as a task."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def training_step(self, batch: list[Tensor]) -> Tensor:
        return self.model(batch[0]).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=1e-3)


class HandWritten:
    """The loop that one would write around the Reducer: shuffled samples, this rank's share of each batch, a step."""

    def __init__(self, task: Squares, samples: Tensor, batch_size: int) -> None:
        self.task, self.samples, self.batch_size = task, samples, batch_size
        group = dist.group.WORLD
        assert group is not None
        self.reducer = Reducer(list(task.named_parameters()), group=group, settings=ReducerSettings(average=False))
        self.optimizer = torch.optim.SGD(task.parameters(), lr=1e-3, fused=True)
        self.order = torch.randperm(len(samples), generator=torch.Generator().manual_seed(0))

    def run(self, steps: int) -> None:
        rank, world_size = dist.get_rank(), dist.get_world_size()
        for step in range(steps):
            batch = self.order[step * self.batch_size + rank : (step + 1) * self.batch_size : world_size]
            with self.reducer.session():
                (self.task.training_step([self.samples[batch]]) / world_size).backward()
            self.optimizer.step()
            self.optimizer.zero_grad()


class Alternate(Callback):
    """After every `SEGMENT` steps of the Trainer runs as many of the hand-written loop, and times both."""

    def __init__(self, loop: HandWritten) -> None:
        self.loop = loop
        self.seconds: list[
            tuple[float, float, float, float]
        ] = []  # of a step: Trainer, loop; the same of the processor
        self._began = (0.0, 0.0)

    def on_step_end(self, run: object) -> None:
        if run.state.step % SEGMENT:  # type: ignore[attr-defined]
            return
        fit, fit_cpu = (now - began for now, began in zip(_clocks(), self._began, strict=True))
        begin = _clocks()
        self.loop.run(SEGMENT)
        loop, loop_cpu = (now - began for now, began in zip(_clocks(), begin, strict=True))
        self.seconds.append((fit / SEGMENT, loop / SEGMENT, fit_cpu / SEGMENT, loop_cpu / SEGMENT))
        dist.barrier()
        self._began = _clocks()


def _clocks() -> tuple[float, float]:
    return time.perf_counter(), time.process_time()


def compare_fit(model: str, rounds: int) -> list[tuple[float, float, float, float]]:
    """Return the seconds of a step in `Trainer.fit` and in the loop for each round, after two to warm up."""
    make, make_input, _ = MODELS[model]
    torch.manual_seed(0)
    start = make()
    share = make_input()
    batch_size = len(share) * dist.get_world_size()
    # One epoch is longer than the run, so that no checkpoint is written in what is timed.
    samples = share.repeat(SEGMENT * (rounds + 3) * dist.get_world_size(), *[1] * (share.dim() - 1))
    alternate = Alternate(HandWritten(Squares(copy.deepcopy(start)), samples, batch_size))
    with tempfile.TemporaryDirectory() as folder:
        trainer = Trainer(
            DDPStrategy(device="cpu"),
            max_duration=f"{(rounds + 2) * SEGMENT}step",
            run_dir=f"{folder}/{dist.get_rank()}",
        )
        trainer.callbacks.append(alternate)
        trainer.fit(Squares(start), Data(train=TensorDataset(samples), batch_size=batch_size))
    return alternate.seconds[2:]


def show_fit(model: str, rounds: int) -> dict[str, float]:
    seconds = run_ranks(compare_fit, 2, model, rounds, timeout=600)[0]
    wall = [fit / loop for fit, loop, _, _ in seconds]
    low, middle, high = statistics.quantiles(wall, n=4)
    row = {
        "fit_ms": 1e3 * statistics.median(fit for fit, _, _, _ in seconds),
        "loop_ms": 1e3 * statistics.median(loop for _, loop, _, _ in seconds),
        "to_loop": middle,
        "low": low,
        "high": high,
        "cpu_to_loop": statistics.median(fit / loop for _, _, fit, loop in seconds),
    }
    print(
        f"{model:7}{row['fit_ms']:10.2f}{row['loop_ms']:10.2f}{middle:8.3f}  [{low:.3f}, {high:.3f}]"
        f"{row['cpu_to_loop']:8.3f}"
    )
    return row


def memory_of(name: str, model: str) -> float:
    """Return the memory of this rank that gradients and their reduction take, in sets of gradients."""
    make, make_input, _ = MODELS[model]
    torch.manual_seed(0)
    module, x = make(), make_input()
    before = _resident_bytes()
    contender = Contender(name, module)
    for _ in range(WARM_UP):
        contender.step(x)
    with nullcontext() if contender.reducer is None else contender.reducer.session():
        contender.wrapped(x).square().mean().backward()
    dist.barrier()
    after = _resident_bytes()
    dist.barrier()
    return (after - before) / sum(p.numel() * p.element_size() for p in module.parameters())


def _resident_bytes() -> int:
    with open("/proc/self/smaps_rollup") as file:
        (line,) = [line for line in file if line.startswith("Pss:")]
    return 1024 * int(line.split()[1])


def show_memory(model: str) -> dict[str, float]:
    found = {name: statistics.mean(run_ranks(memory_of, 2, name, model, timeout=120)) for name in NAMES}
    for name, sets in found.items():
        print(f"{model:7}{name:22}{sets:8.2f} sets of gradients")
    return found


def bookkeeping() -> float:
    """Return the microseconds of our hook for one parameter, without copying or reducing."""
    model = nn.ParameterList(nn.Parameter(torch.ones(1)) for _ in range(BOOKKEEPING_PARAMETERS))
    group = dist.group.WORLD
    assert group is not None
    reducer = Reducer(
        list(model.named_parameters()),
        group=group,
        settings=ReducerSettings(average=False),
        open_transport=partial(open_transport, name="process_group"),
    )
    hooks = [next(iter(p._post_accumulate_grad_hooks.values())) for p in model]

    def backward() -> None:
        torch.stack(list(model)).sum().backward()

    with reducer.session():
        backward()
    best = float("inf")
    for _ in range(50):
        reducer.start()
        begin = time.perf_counter()
        for hook, parameter in zip(hooks, model, strict=True):
            hook(parameter)
        best = min(best, time.perf_counter() - begin)
        reducer.finish()
    return best / BOOKKEEPING_PARAMETERS * 1e6


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--models", default=",".join(MODELS))
    parser.add_argument("--fit", action="store_true")
    parser.add_argument("--memory", action="store_true")
    options = parser.parse_args()
    if options.memory:
        os.environ.update(MALLOC_TRIM_THRESHOLD_="65536", MALLOC_MMAP_THRESHOLD_="65536")
        print(json.dumps({model: show_memory(model) for model in options.models.split(",")}))
        return
    # Read by the processes that are started from here on.
    os.environ.update(MALLOC_TRIM_THRESHOLD_=str(2**36), MALLOC_MMAP_THRESHOLD_=str(2**25), MALLOC_TOP_PAD_=str(2**26))
    if options.fit:
        print(f"{'model':7}{'fit ms':>10}{'loop ms':>10}{'x loop':>8}  {'quartiles':16}{'cpu x':>8}")
        print(json.dumps({model: show_fit(model, options.rounds) for model in options.models.split(",")}))
        return
    results: dict[str, object] = {"bookkeeping_us": run_ranks(bookkeeping, 1)[0]}
    print(f"bookkeeping: {results['bookkeeping_us']:.2f} us for each parameter\n")
    print(
        f"{'model':7}{'contender':22}{'ms':>8}{'x stock':>9}{'x best':>8}  {'quartiles':12}{'cpu ms':>9}{'x best':>8}"
    )
    for model in options.models.split(","):
        seconds = run_ranks(compare, 2, model, options.rounds, timeout=600)[0]
        results[model] = {name: _row(model, name, seconds) for name in NAMES}
    print(json.dumps(results))


def _row(model: str, name: str, seconds: dict[str, list[tuple[float, float]]]) -> dict[str, float]:
    def ratios(other: str, column: int) -> list[float]:
        return [a[column] / b[column] for a, b in zip(seconds[name], seconds[other], strict=True)]

    low, middle, high = statistics.quantiles(ratios(BEST, 0), n=4)
    row = {
        "ms": 1e3 * statistics.median(wall for wall, _ in seconds[name]),
        "to_stock": statistics.median(ratios("stock", 0)),
        "to_best": middle,
        "low": low,
        "high": high,
        "cpu_ms": 1e3 * statistics.median(processor for _, processor in seconds[name]),
        "cpu_to_best": statistics.median(ratios(BEST, 1)),
    }
    print(
        f"{model:7}{name:22}{row['ms']:8.1f}{row['to_stock']:9.2f}{middle:8.2f}  [{low:.2f}, {high:.2f}]"
        f"{row['cpu_ms']:9.1f}{row['cpu_to_best']:8.2f}"
    )
    return row


if __name__ == "__main__":
    main()
