"""Step time between hosts whose links have a limited rate, as a multiple of the time that the wire alone takes.

    python benchmarks/network.py                      2 and 4 hosts with 1 and 2 ranks each, a quarter of an hour
    python benchmarks/network.py --hosts 2 --ranks 2 --rate 1000 --models gpt4 --contenders wire torch_ddp ddp
    python benchmarks/network.py --hosts 2 --ranks 1 --contenders pipeline "pipeline ahead"
    python benchmarks/network.py --hosts 4 --ranks 1 --rate 1000 --models waits --contenders alone torch_ddp ddp fusion

Hosts are Linux namespaces (hosts.py), which need root. All contenders live in the same processes and take turns step by
step. `wire` sends over plain sockets what every host must send at least, 2 (H-1)/H of the gradients; headers (4.5 % at
1500 bytes a packet) and confirmations are what it takes above the least time, which is these bytes divided by the rate.
Times are medians of the slowest rank; bytes are those of the host that sends most, counted by its network device,
without the headers of Ethernet, IP and TCP. Processor time (CPU s) is that of all ranks together.

`alone` trains on each rank without the others, so that its time over another's is the share of linear scaling.
Backward cannot hide what comes before its first gradient and after its last one: with the least time and its headers
that is the floor of the others, unless a step alone takes longer. Hosts share the cores of this machine; so layers of
the model `waits` wait, as for a device that each host has to itself.

`pipeline` has one stage on each host, and replicas of it on the ranks of the host, so that activations alone go between
hosts; `pipeline ahead` has more micro-batches in flight. Their rows have the idle share of the ranks beside that of the
schedule with equal stages, and beside what the wire must take of a step: one micro-batch to the last stage and back,
and what does not fit beside the computation.
"""

from __future__ import annotations

import argparse
import itertools
import json
import multiprocessing
import os
import socket
import statistics
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from ddp_step import MODELS, Squares
from hosts import PORT, Hosts, become_bridge, why_no_hosts
from torch import Tensor, nn
from trainkit.strategies.ddp.strategy import DDPStrategy
from trainkit.strategies.fsdp.strategy import FSDPStrategy
from trainkit.strategies.fusion.strategy import FusionStrategy
from trainkit.strategies.pipeline.plan.schedules import idle_share
from trainkit.strategies.pipeline.strategy import PipelineStrategy
from trainkit.strategies.single import SingleStrategy
from trainkit.strategies.torch_ddp import TorchDDPStrategy

from strategies import Runner
from trainkit.data.batch import MicroBatch, StepBatch
from trainkit.strategy import Strategy

WIRE, ALONE = "wire", "alone"
PIPELINE, PIPELINE_AHEAD = "pipeline", "pipeline ahead"
MICRO_BATCHES = 8  # of a step of the pipeline
FORWARD_SECONDS = 0.025  # of a layer that waits; its backward takes twice as long
CONTENDERS: dict[str, Callable[[], Strategy]] = {
    "torch_ddp": lambda: TorchDDPStrategy(device="cpu"),
    "torch_ddp best": lambda: TorchDDPStrategy(device="cpu", static_graph=True, bucket_cap_mb=1),
    "ddp": lambda: DDPStrategy(device="cpu"),
    "ddp 25 MiB": lambda: DDPStrategy(device="cpu", bucket_cap_mb=25),
    "ddp bf16": lambda: DDPStrategy(device="cpu", reduce_dtype="bf16"),
    "ddp group": lambda: DDPStrategy(device="cpu", transport="process_group"),
    "fusion": lambda: FusionStrategy(device="cpu"),
    "fusion no thread": lambda: FusionStrategy(device="cpu", communication_thread=False),
    "fusion bf16": lambda: FusionStrategy(device="cpu", reduce_dtype="bf16"),
    "fusion sharded": lambda: FusionStrategy(device="cpu", shard_optimizer=True),
    "fsdp": lambda: FSDPStrategy(device="cpu"),
}
CHOICES = (WIRE, ALONE, PIPELINE, PIPELINE_AHEAD, *CONTENDERS)
DEFAULT = (WIRE, ALONE, "torch_ddp", "torch_ddp best", "ddp", "fusion", "fusion sharded", "fsdp")
LEARNING_RATES = {"mlp5": 10.0, "gpt4": 1e-3, "mlp60": 10.0, "waits": 10.0}
WARM_UP = 2
HEADER_BYTES = 14 + 20 + 32  # of a packet, which a network device counts
PAYLOAD_BYTES = 1500 - 20 - 32  # of a packet, at most

# ---- Ranks


class Waiting(torch.autograd.Function):
    """Returns its input after a time, and the gradient after twice that time."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor) -> Tensor:
        time.sleep(FORWARD_SECONDS)
        return hidden.view_as(hidden)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        time.sleep(2 * FORWARD_SECONDS)
        return gradients[0]


class Waits(nn.Sequential):
    """Layers of which each linear one waits, as for a device that computes."""

    def forward(self, hidden: Tensor) -> Tensor:
        for layer in self:
            hidden = layer(hidden)
            if isinstance(layer, nn.Linear):
                hidden = Waiting.apply(hidden)
        return hidden


class Model(Squares):
    """One of the models, with the batch of a rank."""

    def __init__(self, name: str) -> None:
        make, self.make_input, _ = MODELS["mlp5" if name == "waits" else name]
        model = make()
        super().__init__(Waits(*model) if name == "waits" else model)
        self.lr = LEARNING_RATES[name]

    def batch(self, num_samples: int) -> list[Tensor]:
        """Return random inputs; each model has its own number of samples."""
        return [self.make_input()]

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Return an optimizer whose steps are far above the rounding of the weights."""
        return torch.optim.SGD(self.parameters(), lr=self.lr)


class Wire:
    """Sends the bytes that a host must send at least to the next host, and receives as many."""

    def __init__(self, num_bytes: int) -> None:
        rank, world_size, ranks = dist.get_rank(), dist.get_world_size(), int(os.environ["LOCAL_WORLD_SIZE"])
        hosts = world_size // ranks
        self.num_bytes = 2 * (hosts - 1) * num_bytes // (hosts * ranks)
        with socket.create_server(("0.0.0.0", PORT + 1 + rank % ranks)) as server:
            dist.barrier()
            following = (rank // ranks + 1) % hosts
            self.sender = socket.create_connection((f"10.77.0.{following + 1}", PORT + 1 + rank % ranks))
            self.receiver, _ = server.accept()

    def step(self) -> None:
        """Send and receive at the same time."""
        thread = threading.Thread(target=self.sender.sendall, args=(bytes(self.num_bytes),))
        thread.start()
        missing = self.num_bytes
        memory = bytearray(1 << 20)
        while missing:
            missing -= self.receiver.recv_into(memory, min(missing, len(memory)))
        thread.join()


class Alone(Runner):
    """A copy of the task that trains on these inputs on one device, without other ranks."""

    def __init__(self, task: Model, inputs: Tensor) -> None:
        super().__init__(SingleStrategy(device="cpu"), task, num_samples=len(inputs))
        self.step_batch = StepBatch([MicroBatch([inputs], len(inputs))], len(inputs), len(inputs), False)
        self.unhidden: list[float] = []
        self._gradients_at: list[float] = []
        for parameter in self.task.parameters():
            parameter.register_post_accumulate_grad_hook(lambda _: self._gradients_at.append(time.perf_counter()))

    def step(self) -> None:
        """Make one step, and note how much of it is before its first gradient or after the last one."""
        self._gradients_at.clear()
        began = time.perf_counter()
        super().step()
        self.unhidden.append(time.perf_counter() - began - (self._gradients_at[-1] - self._gradients_at[0]))

    def figures(self) -> dict[str, float]:
        """Return the seconds of a step that no communication can share."""
        return {"unhidden": statistics.median(self.unhidden[WARM_UP:])}


class Pipeline(Runner):
    """A pipeline with one stage on each host, which trains on the inputs of all ranks."""

    def __init__(self, task: Model, everything: Tensor, *, runs_ahead: bool) -> None:
        replicas = int(os.environ["LOCAL_WORLD_SIZE"])
        stages = dist.get_world_size() // replicas
        self.pipeline = PipelineStrategy(
            stages=stages,
            replicas=replicas,
            max_in_flight=2 * stages - 1 if runs_ahead else None,
            placement="spread",
            device="cpu",
            verify="off",
            accumulate=MICRO_BATCHES,
        )
        super().__init__(self.pipeline, task, num_samples=len(everything))
        own = everything[self.pipeline.comm.rank :: replicas]
        batches = [MicroBatch([chunk], len(chunk)) for chunk in own.chunk(MICRO_BATCHES)]
        self.step_batch = StepBatch(batches, len(everything), len(own), False)
        self.idle: list[float] = []
        self.busy: list[float] = []

    def note_idle(self) -> None:
        """Note how long the ranks computed in the last step. Collective."""
        spans = self.pipeline.runtime.timeline()
        self.idle.append(idle_share(spans))
        self.busy.append(max(sum(span.end - span.start for span in row) for row in spans))

    def figures(self) -> dict[str, float]:
        """Return the shares of a step, and bytes of one micro-batch between two stages. Collective."""
        assert self.pipeline.plan_report is not None
        num_micro_batches = len(self.step_batch.micro_batches)
        figures = {
            "idle": statistics.median(self.idle[WARM_UP:]),
            "formula": self.pipeline.schedule.bubble(num_micro_batches),
            "busy": statistics.median(self.busy[WARM_UP:]),
            "micro_batches": num_micro_batches,
            "message_bytes": max(stage.received_bytes for stage in self.pipeline.plan_report.stages),
        }
        self.pipeline.state.make_whole(self.task)
        return figures


def payload_sent() -> int:
    """Return the bytes that this host has sent so far, without headers."""
    counters = Path("/sys/class/net/eth0/statistics")
    sent, packets = (int((counters / name).read_text()) for name in ("tx_bytes", "tx_packets"))
    return sent - HEADER_BYTES * packets


def on_ranks(name: str, task: Model, everything: Tensor, own: Tensor) -> Runner:
    """Return a contender with its copy of the task, ready to train on the inputs of all ranks. Collective."""
    if name in (PIPELINE, PIPELINE_AHEAD):
        return Pipeline(task, everything, runs_ahead=name == PIPELINE_AHEAD)
    runner = Runner(CONTENDERS[name](), task, num_samples=len(everything))
    runner.step_batch = StepBatch([MicroBatch([own], len(own))], len(everything), len(own), False)
    return runner


def trained_alone(task: Model, inputs: Tensor, *, num_steps: int) -> Model:
    """Return a copy of the task, trained on one device."""
    runner = Alone(task, inputs)
    for _ in range(num_steps):
        runner.step()
    return runner.task


def measure(names: Sequence[str], model: str, rounds: int) -> dict[str, Any]:
    """Return for each contender the seconds of a step, the bytes of each host, and the difference from one device."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, world_size, ranks = dist.get_rank(), dist.get_world_size(), int(os.environ["LOCAL_WORLD_SIZE"])
    torch.manual_seed(0)
    task = Model(model)
    torch.manual_seed(rank)
    (inputs,) = task.batch(0)
    num_bytes = sum(parameter.nbytes for parameter in task.parameters())
    everything = torch.empty(world_size * len(inputs), *inputs.shape[1:], dtype=inputs.dtype)
    dist.all_gather_into_tensor(everything, inputs)
    runners: dict[str, Runner] = {}
    alone: Alone | None = None
    steps: dict[str, Callable[[], object]] = {}
    for name in names:
        if name == WIRE:
            steps[name] = Wire(num_bytes).step
        elif name == ALONE:
            alone = Alone(task, inputs)
            steps[name] = alone.step
        else:
            runners[name] = on_ranks(name, task, everything, inputs)
            steps[name] = runners[name].step
    seconds: dict[str, list[float]] = {name: [] for name in names}
    sent: dict[str, list[Tensor]] = {name: [] for name in names}
    processor: dict[str, list[float]] = {name: [] for name in names}
    for turn in range(WARM_UP + rounds):
        for offset in range(len(names)):
            name = names[(turn + offset) % len(names)]
            dist.barrier()
            before, began, used = payload_sent(), time.perf_counter(), time.process_time()
            steps[name]()
            taken, used = torch.tensor(time.perf_counter() - began, dtype=torch.float64), time.process_time() - used
            dist.barrier()
            if isinstance(runner := runners.get(name), Pipeline):
                runner.note_idle()
            of_ranks = torch.zeros(world_size, 2, dtype=torch.float64)
            of_ranks[rank] = torch.tensor([payload_sent() - before, used], dtype=torch.float64)
            dist.all_reduce(taken, dist.ReduceOp.MAX)
            dist.all_reduce(of_ranks)
            if turn >= WARM_UP:
                seconds[name].append(taken.item())
                processor[name].append(of_ranks[:, 1].sum().item())
                sent[name].append(of_ranks[::ranks, 0])  # ranks of a host count on the same device
    figures = {name: runner.figures() for name, runner in runners.items() if isinstance(runner, Pipeline)}
    if alone is not None:
        figures[ALONE] = alone.figures()
    for runner in runners.values():
        runner.strategy.final_state_dict(runner.task)  # which is whole afterwards
    single = trained_alone(task, everything, num_steps=WARM_UP + rounds if rank == 0 else 0)
    dist.barrier()
    found = {
        name: {
            "seconds": seconds[name],
            "processor_seconds": statistics.median(processor[name]),
            "bytes": torch.stack(sent[name]).median(dim=0).values.tolist(),
            "difference": difference(runners[name].task, single, task) if name in runners else 0.0,
            **figures.get(name, {}),
        }
        for name in names
    }
    for runner in runners.values():
        runner.strategy.teardown()
    dist.barrier()  # the store of rank 0 is asked until here
    return {"gradient_bytes": num_bytes, "contenders": found}


def run_ranks_of_host(*arguments: Any) -> int:
    """Fork the ranks of this host, and return 1 if one fails, else 0."""
    import torch._dynamo  # noqa: F401 # which an optimizer's first step imports, once and not in each rank

    first, count = int(os.environ["FIRST_RANK"]), int(os.environ["LOCAL_WORLD_SIZE"])
    fork = multiprocessing.get_context("fork")
    ranks = [fork.Process(target=_run_rank, args=(first, local, *arguments)) for local in range(count)]
    for rank in ranks:
        rank.start()
    for rank in ranks:
        rank.join()
    return int(any(rank.exitcode for rank in ranks))


def _run_rank(first: int, local: int, *arguments: Any) -> None:
    os.environ.update(RANK=str(first + local), LOCAL_RANK=str(local))
    found = measure(*arguments)
    if dist.get_rank() == 0:
        print(json.dumps(found), flush=True)
    dist.destroy_process_group()


def difference(trained: Model, expected: Model, start: Model) -> float:
    """Return the distance of trained weights from the expected ones, relative to that from the start."""
    triples = zip(trained.parameters(), expected.parameters(), start.parameters(), strict=True)
    with torch.no_grad():
        pairs = [((ours - theirs).norm(), (theirs - first).norm()) for ours, theirs, first in triples]
    wrong, moved = (torch.stack(norms).norm().item() for norms in zip(*pairs, strict=True))
    return wrong / moved if moved else float("inf")


# ---- Tables


def show(title: str, found: dict[str, Any], *, hosts: int, megabits: float) -> None:
    """Print the table of one model and layout."""
    least = 2 * (hosts - 1) / hosts * found["gradient_bytes"]
    wire = 8 * least / 1e6 / megabits
    print(f"{title}: {least / 1e6:.1f} MB in {wire:.3f} s at least")
    print(
        f"  {'contender':<16}{'s a step':>9}{'quartiles':>18}{'x least':>9}{'x stock':>9}{'MB sent':>9}{'x least':>9}"
        f"{'CPU s':>8}{'linear':>8}{'x floor':>9}"
    )
    rows = found["contenders"]
    medians = {name: statistics.median(row["seconds"]) for name, row in rows.items()}
    unhidden = rows.get(ALONE, {}).get("unhidden", 0.0)
    floor = max(wire * (1 + HEADER_BYTES / PAYLOAD_BYTES) + unhidden, medians.get(ALONE, 0.0))
    for name, row in rows.items():
        if name in (PIPELINE, PIPELINE_AHEAD):
            show_pipeline(name, row, hosts=hosts, megabits=megabits)
            continue
        low, _, high = statistics.quantiles(row["seconds"], n=4)
        to_stock = f"{medians[name] / medians['torch_ddp']:.2f}" if "torch_ddp" in medians else ""
        is_trained = ALONE in medians and name != WIRE
        linear = f"{medians[ALONE] / medians[name]:.3f}" if is_trained else ""
        to_floor = f"{medians[name] / floor:.2f}" if is_trained and name != ALONE else ""
        most = max(row["bytes"])
        quartiles = f"[{low:.3f}, {high:.3f}]"
        print(
            f"  {name:<16}{medians[name]:>9.3f}{quartiles:>18}{medians[name] / wire:>9.2f}{to_stock:>9}"
            f"{most / 1e6:>9.2f}{most / least:>9.3f}{row['processor_seconds']:>8.2f}{linear:>8}{to_floor:>9}"
        )


def show_pipeline(name: str, row: dict[str, Any], *, hosts: int, megabits: float) -> None:
    """Print a pipeline's seconds a step, its idle share, and what the schedule and the wire must take of it."""
    seconds, message = statistics.median(row["seconds"]), 8 * row["message_bytes"] / 1e6 / megabits
    unhidden = 2 * (hosts - 1) * message + max(0.0, row["micro_batches"] * message - row["busy"])
    print(
        f"  {name:<16}{seconds:>9.3f} s a step, {max(row['bytes']) / 1e6:.2f} MB sent; idle {row['idle']:.1%}, "
        f"formula {row['formula']:.1%}, the wire must take {unhidden / seconds:.1%}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--hosts", nargs="+", type=int, default=[2, 4])
    parser.add_argument("--ranks", nargs="+", type=int, default=[1, 2], help="of a host")
    parser.add_argument("--rate", type=float, default=200, help="Mbit/s of the link of a host, in each direction")
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--models", nargs="+", default=["mlp5"], choices=list(LEARNING_RATES))
    parser.add_argument("--contenders", nargs="+", default=list(DEFAULT), choices=list(CHOICES))
    parser.add_argument("--json", action="store_true", help="print the figures instead of tables")
    parser.add_argument("--role", choices=("caller", "bridge", "host"), default="caller", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.role == "host":
        sys.exit(run_ranks_of_host(options.contenders, options.models[0], options.rounds))
    if options.role == "caller":
        reason = why_no_hosts()
        if reason is not None:
            sys.exit(f"network.py cannot run here: {reason}")
        become_bridge(sys.executable, __file__, *sys.argv[1:], "--role", "bridge")
    results = {}
    layouts = itertools.product(options.models, options.hosts, options.ranks)
    for number, (model, hosts, ranks) in enumerate(layouts):
        title = f"{model}, {hosts} x {ranks} at {options.rate:g} Mbit/s"
        arguments = ["--role", "host", "--models", model, "--rounds", str(options.rounds)]
        command = [sys.executable, __file__, *arguments, "--contenders", *options.contenders]
        with Hosts(command, count=hosts, ranks=ranks, megabits=options.rate, name=f"net{number}") as started:
            printed = started.read_line(0)
            if any([process.wait() for process in started.processes]):
                sys.exit("a rank failed")
        found = json.loads(printed)
        results[f"{model} {hosts}x{ranks}"] = found
        if not options.json:
            show(title, found, hosts=hosts, megabits=options.rate)
    if options.json:
        print(json.dumps(results))


if __name__ == "__main__":
    main()
