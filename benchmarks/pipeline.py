"""Costs of a pipeline: step time against torch.distributed.pipelining, balance, planning, overhead per micro-batch.

    python benchmarks/pipeline.py [--rounds 5] [--width 256] [--only speed,balance,planning,overhead]

Two processes on this machine, one thread each. The contenders take turns, step by step, over the same two stages.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Sequence
from statistics import median
from typing import Any, get_args

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe
from trainkit.strategies.pipeline.plan.partition import StageCosts
from trainkit.strategies.pipeline.plan.plan_report import PlanReport
from trainkit.strategies.pipeline.plan.planner import Costs, PartitionPlan, TraceInput, TrainingStep, plan_steps
from trainkit.strategies.pipeline.plan.schedules import Schedule, Span, idle_share
from trainkit.strategies.pipeline.strategy import PipelineStrategy

from trainkit.data.batch import MicroBatch, StepBatch
from trainkit.optim.precision import Precision
from trainkit.task import TaskModule
from trainkit.testing import run_ranks

VOCABULARY, LENGTH, BATCH_SIZE = 512, 64, 32
WARM_UP_ROUNDS = 2
Step = Callable[[], None]


class Block(nn.Module):
    """One layer of a transformer."""

    def __init__(self, width: int):
        super().__init__()
        self.first, self.second = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.feed_forward = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        """Return x after attention and feed-forward."""
        rows, length, width = x.shape  # (rows, length, width)
        q, k, v = self.qkv(self.first(x)).view(rows, length, 3, 4, width // 4).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(rows, length, width)
        x = x + self.out(y)
        return x + self.feed_forward(self.second(x))


class Gpt(TaskModule):
    """A language model."""

    def __init__(self, width: int, depth: int):
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, width)
        self.positions = nn.Parameter(torch.zeros(LENGTH, width))
        self.blocks = nn.ModuleList([Block(width) for _ in range(depth)])
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, VOCABULARY)

    def training_step(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        """Return the loss of one micro-batch."""
        x = self.tokens(batch[0]) + self.positions
        for block in self.blocks:
            x = block(x)
        return loss_of(self.head(self.norm(x)), batch[1])


class ResNet(TaskModule):
    """A convolutional network with residual connections."""

    def __init__(self) -> None:
        super().__init__()
        widths = [32] * 6 + [64] * 6 + [128] * 6
        self.stem = nn.Conv2d(3, 32, 3, 1, 1)
        pairs = list(zip([32, *widths], widths, strict=False))
        self.convolutions = nn.ModuleList([nn.Conv2d(a, b, 3, 1 + (a != b), 1) for a, b in pairs])
        self.norms = nn.ModuleList([nn.BatchNorm2d(width) for width in widths])
        self.head = nn.Linear(128, 10)

    def training_step(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        """Return the loss of one micro-batch."""
        x = self.stem(batch[0])
        for convolution, norm in zip(self.convolutions, self.norms, strict=True):
            y = torch.relu(norm(convolution(x)))
            x = x + y if x.shape == y.shape else y
        return F.cross_entropy(self.head(x.mean((2, 3))), batch[1])


class UNet(TaskModule):
    """A network whose late layers use the results of early ones."""

    def __init__(self) -> None:
        super().__init__()
        widths = [16, 32, 64]
        self.down = nn.ModuleList([_convolutions(a, b) for a, b in zip([3, *widths], widths, strict=False)])
        self.middle = _convolutions(64, 64)
        self.up = nn.ModuleList([_convolutions(128, 32), _convolutions(64, 16), _convolutions(32, 16)])
        self.last = nn.Conv2d(16, 3, 1)

    def training_step(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        """Return the loss of one micro-batch."""
        x, skips = batch[0], []
        for layers in self.down:
            x = layers(x)
            skips.append(x)
            x = F.max_pool2d(x, 2)
        x = self.middle(x)
        for layers in self.up:
            x = layers(torch.cat([F.interpolate(x, scale_factor=2), skips.pop()], 1))
        return F.mse_loss(self.last(x), batch[0])


def _convolutions(inputs: int, outputs: int) -> nn.Sequential:
    first, second = nn.Conv2d(inputs, outputs, 3, 1, 1), nn.Conv2d(outputs, outputs, 3, 1, 1)
    third = nn.Conv2d(outputs, outputs, 3, 1, 1)
    return nn.Sequential(first, nn.ReLU(), second, nn.ReLU(), third, nn.ReLU())


def loss_of(logits: Tensor, targets: Tensor) -> Tensor:
    """Return the mean cross entropy of all tokens."""
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


class HandCut(nn.Module):
    """One of two stages of `Gpt`, cut by hand as torch.distributed.pipelining requires."""

    def __init__(self, task: Gpt, stage: int, cut: int):
        super().__init__()
        self.stage, self.task = stage, task
        self.blocks = task.blocks[:cut] if stage == 0 else task.blocks[cut:]

    def forward(self, x: Tensor) -> Tensor:
        """Return this stage's result."""
        if self.stage == 0:
            x = self.task.tokens(x) + self.task.positions
        for block in self.blocks:
            x = block(x)
        return x if self.stage == 0 else self.task.head(self.task.norm(x))


def speed_on_rank(width: int, depth: int, rounds: int, count: int) -> dict[str, list[float]]:
    """Return the seconds of each contender's steps with `count` micro-batches, and the measured idle shares."""
    cut = depth // 2
    torch.manual_seed(0)
    tokens = torch.randint(0, VOCABULARY, (BATCH_SIZE, LENGTH))
    batch = (tokens, torch.randint(0, VOCABULARY, (BATCH_SIZE, LENGTH)))
    contenders = {
        "trainkit gpipe": _own("gpipe", task=Gpt(width, depth), cut=cut, batch=batch, count=count),
        "trainkit 1f1b": _own("1f1b", task=Gpt(width, depth), cut=cut, batch=batch, count=count),
        "torch GPipe": _upstream(ScheduleGPipe, task=Gpt(width, depth), cut=cut, batch=batch, count=count),
        "torch 1F1B": _upstream(Schedule1F1B, task=Gpt(width, depth), cut=cut, batch=batch, count=count),
    }
    found: dict[str, list[float]] = {name: [] for name in (*contenders, "idle", "uneven")}
    for index in range(rounds + WARM_UP_ROUNDS):
        # In another order each round, so that no contender always follows the same one.
        names = list(contenders)[index % 4 :] + list(contenders)[: index % 4]
        for name in names:
            step, strategy = contenders[name]
            dist.barrier()
            start = time.perf_counter()
            step()
            dist.barrier()
            if index >= WARM_UP_ROUNDS:
                found[name].append(time.perf_counter() - start)
                if name == "trainkit 1f1b":
                    spans = strategy.runtime.timeline()
                    found["idle"].append(idle_share(spans))
                    found["uneven"].append(_unevenness(spans))
    return found


def _unevenness(spans: Sequence[Sequence[Span]]) -> float:
    """Return the busier rank's time over the mean: idleness that no schedule can help."""
    busy = [sum(span.end - span.start for span in row) for row in spans]
    return max(busy) * len(busy) / sum(busy)


def _own(
    schedule: str, *, task: Gpt, cut: int, batch: tuple[Tensor, Tensor], count: int
) -> tuple[Step, PipelineStrategy]:
    strategy = PipelineStrategy(stages=2, schedule=schedule, split_points=[f"blocks.{cut}"], device="cpu")
    strategy.setup(Precision())
    strategy.prepare(task)
    pairs = zip(batch[0].chunk(count), batch[1].chunk(count), strict=True)
    step_batch = StepBatch([MicroBatch(pair, len(pair[0])) for pair in pairs], BATCH_SIZE, BATCH_SIZE, False)

    def step() -> None:
        strategy.forward_backward(task, step_batch)
        for parameter in task.parameters():
            parameter.grad = None

    return step, strategy


def _upstream(schedule: Any, *, task: Gpt, cut: int, batch: tuple[Tensor, Tensor], count: int) -> tuple[Step, None]:
    rank = dist.get_rank()
    module = HandCut(task, rank, cut)
    stage = PipelineStage(module, rank, 2, torch.device("cpu"))
    runner = schedule(stage, n_microbatches=count, loss_fn=loss_of)

    def step() -> None:
        if rank == 0:
            runner.step(batch[0])
        else:
            runner.step(target=batch[1], losses=[])
        for parameter in module.parameters():
            parameter.grad = None

    return step, None


def show_speed(arguments: argparse.Namespace) -> None:
    """Print step times beside those of torch.distributed.pipelining: medians, and least times against noise."""
    names = ["trainkit gpipe", "trainkit 1f1b", "torch GPipe", "torch 1F1B"]
    print(f"\nms a step: median (least of {arguments.rounds}); {BATCH_SIZE} x {LENGTH} tokens, width {arguments.width}")
    titles = " ".join(f"{name:>21}" for name in names)
    print(
        f"{'micro-batches':>14} {titles} {'1f1b / best':>19} {'idle':>7} {'formula':>8} {'uneven':>7}",
        flush=True,
    )
    for count in [int(count) for count in arguments.micro_batches.split(",")]:
        found = run_ranks(speed_on_rank, 2, arguments.width, arguments.depth, arguments.rounds, count, timeout=580)[0]
        times = [found[name] for name in names]
        # Of steps that follow each other, so that what slows the machine for a while slows both.
        paired = max(
            median(own / other for own, other in zip(times[1], upstream, strict=True)) for upstream in times[2:]
        )
        ratios = [paired, min(times[1]) / min(min(upstream) for upstream in times[2:])]
        cells = " ".join(f"{median(values) * 1e3:11.1f} ({min(values) * 1e3:7.1f})" for values in times)
        print(
            f"{count:>14} {cells} {ratios[0]:11.3f} ({ratios[1]:.3f}) {median(found['idle']):7.1%} "
            f"{Schedule('1f1b', 2).bubble(count):8.1%} {median(found['uneven']):7.3f}",
            flush=True,
        )


def show_balance() -> None:
    """Print the imbalance of automatic plans, by their own costs."""
    generator = torch.Generator().manual_seed(0)
    image = torch.randn(4, 3, 32, 32, generator=generator)
    labels = torch.randint(0, 10, (4,), generator=generator)
    tokens = torch.randint(0, VOCABULARY, (4, LENGTH), generator=generator)
    cases: dict[str, tuple[TaskModule, Any]] = {
        "GPT": (Gpt(128, 8), (tokens, tokens)),
        "ResNet": (ResNet(), (image, labels)),
        "U-Net": (UNet(), (image, labels)),
    }
    print(f"\n{'model':>8} {'stages':>7} {'nodes':>7} {'imbalance':>10} {'best cuts':>10} {'seconds':>8}")
    for name, (task, batch) in cases.items():
        for stages in (2, 4):
            start = time.perf_counter()
            plan = _plan(task, batch, stages, "measured")
            seconds = time.perf_counter() - start
            graph = plan.whole
            shown = PlanReport.of(graph, plan.partition, bubble=0.0)
            costs = StageCosts.of(graph, num_stages=stages, balance=0.0)
            best = _best_limit([costs(0, index, index + 1) for index in range(len(graph.nodes))], stages)
            ratio = costs.slowest(plan.partition.cuts) / best
            sizes = f"{name:>8} {stages:>7} {len(graph.nodes):>7}"
            print(f"{sizes} {shown.imbalance:>10.3f} {ratio:>10.3f} {seconds:>8.2f}")


def _plan(task: TaskModule, batch: Any, stages: int, costs: Costs) -> PartitionPlan:
    return plan_steps([TraceInput(task, TrainingStep(task.training_step), batch, costs)], num_stages=stages)


def _best_limit(costs: list[float], stages: int) -> float:
    low, high = max(costs), sum(costs)
    for _ in range(60):
        middle, needed, filled = (low + high) / 2, 1, 0.0
        for cost in costs:
            if filled + cost > middle:
                needed, filled = needed + 1, 0.0
            filled += cost
        low, high = (low, middle) if needed <= stages else (middle, high)
    return high


def show_planning() -> None:
    """Print the seconds of tracing and partitioning a deep model."""
    tokens = torch.randint(0, VOCABULARY, (2, LENGTH))
    depth = 150
    task = Gpt(64, depth)
    for costs in get_args(Costs):
        start = time.perf_counter()
        graph = _plan(task, (tokens, tokens), 4, costs).whole
        print(f"\n{depth} layers, 4 stages, {costs}: {time.perf_counter() - start:.2f} s, {len(graph.nodes)} nodes")


def overhead_on_rank(depth: int) -> dict[str, float]:
    """Return microseconds of a stage's forward in the pipeline, and of the same modules called directly."""
    task = Gpt(64, depth)
    strategy = PipelineStrategy(stages=2, split_points=[f"blocks.{depth // 2}"], device="cpu")
    strategy.setup(Precision())
    strategy.prepare(task)
    tokens = torch.randint(0, VOCABULARY, (1, LENGTH))
    step_batch = StepBatch([MicroBatch((tokens, tokens), 1) for _ in range(4)], 4, 4, False)
    for _ in range(3):
        strategy.forward_backward(task, step_batch)
    executor = next(iter(strategy.staged_model.steps.values()))
    stage_graph = executor.stage_graphs[dist.get_rank()]
    shapes = next(iter(executor.shapes.values()))
    hidden = torch.randn(1, LENGTH, 64)
    received = {transfer.value: hidden for transfer in stage_graph.receives}
    with_pipeline, direct = [], []
    for _ in range(60):
        with executor.interceptor.installed():
            start = time.perf_counter()
            executor.run(stage_graph, task.training_step, (tokens, tokens), received=received, shapes=shapes, seed=0)
            with_pipeline.append(time.perf_counter() - start)
        start = time.perf_counter()
        x = hidden if stage_graph.index else task.tokens(tokens) + task.positions
        for block in task.blocks[depth // 2 :] if stage_graph.index else task.blocks[: depth // 2]:
            x = block(x)
        if stage_graph.index:
            loss_of(task.head(task.norm(x)), tokens)
        direct.append(time.perf_counter() - start)
    return {"pipeline": median(with_pipeline) * 1e6, "direct": median(direct) * 1e6}


def show_overhead() -> None:
    """Print what a replay costs beyond the stage's own modules."""
    print(f"\n{'layers':>7} {'stage':>6} {'replay us':>10} {'direct us':>10} {'beyond us':>10}")
    for depth in (8, 48):
        for stage, found in enumerate(run_ranks(overhead_on_rank, 2, depth, timeout=200)):
            beyond = found["pipeline"] - found["direct"]
            print(f"{depth:>7} {stage:>6} {found['pipeline']:>10.0f} {found['direct']:>10.0f} {beyond:>10.0f}")


def main() -> None:
    """Run the parts asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--micro-batches", default="2,4,8,16")
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--depth", type=int, default=8)
    parser.add_argument("--only", default="speed,balance,planning,overhead")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    parts = arguments.only.split(",")
    if "balance" in parts:
        show_balance()
    if "planning" in parts:
        show_planning()
    if "overhead" in parts:
        show_overhead()
    if "speed" in parts:
        show_speed(arguments)


if __name__ == "__main__":
    main()
