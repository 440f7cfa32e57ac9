"""What a step costs on the device, beside loops of torch alone: tables for benchmarks/RESULTS.md.

    python -m tests.gpu.speed FOLDER             all parts, into FOLDER/RESULTS.md
    python -m tests.gpu.speed --part compile     this part alone, printed

Contenders of a table take turns in one process, and ratios are taken round by round against the first of them.
"""

from __future__ import annotations

import argparse
import math
import os
import statistics
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.utils.data import TensorDataset
from trainkit.strategies.ddp.strategy import DDPStrategy
from trainkit.strategies.fusion.strategy import FusionStrategy
from trainkit.strategies.single import SingleStrategy
from trainkit.strategies.torch_ddp import TorchDDPStrategy

from benchmarks.ddp_step import MODELS, Squares
from tests.gpu.figures import failed, figure
from tests.gpu.runner import ROOT
from tests.pretended_cuda import VARIABLE
from tests.strategies.pipeline.test_gpu import CountWaits
from tests.tasks import fit
from trainkit import Callback, Data
from trainkit.testing import run_ranks

REHEARSAL = VARIABLE in os.environ
WARM_UP, STEPS, ROUNDS = (2, 3, 1) if REHEARSAL else (20, 100, 5)
KINDS = {"torch_ddp": TorchDDPStrategy, "ddp": DDPStrategy, "fusion": FusionStrategy}
TWO_RANKS = ("--strategies", "torch_ddp", "ddp", "fusion", "fusion bf16", "fusion exchange", "single", "dp")
LIMIT = 150
"""Seconds of a part."""
SCRIPTS = {
    "overhead of a step": ("step_overhead.py", "--only", "ready,map256", *("--steps", "1000", "--rounds", "5")),
    "two ranks that share the device, over gloo": ("strategies.py", "--models", "gpt_4m", "--rounds", "5", *TWO_RANKS),
    "checkpoints": ("checkpointing.py", "--rounds", "5", "--folder", tempfile.gettempdir()),
}
IN_REHEARSAL = {
    "overhead of a step": ("--only", "ready", "--steps", "20", "--rounds", "1"),
    "two ranks that share the device, over gloo": ("--rounds", "1"),
    "checkpoints": ("--rounds", "2", "--parameters", "30_000_000"),
}


class Timed(Callback):
    """The seconds of a step, after the first ones."""

    def on_step_end(self, run: Any) -> None:
        if run.state.step in (WARM_UP, WARM_UP + STEPS):
            torch.cuda.synchronize()
            now = time.perf_counter()
            self.seconds = now if run.state.step == WARM_UP else (now - self.seconds) / STEPS


def samples(model: str) -> torch.Tensor:
    """Return the samples of a whole run, so that no epoch ends in what is timed."""
    share = MODELS[model][1]()
    return share.repeat(WARM_UP + STEPS + 1, *[1] * (share.dim() - 1))


def trained(model: str, strategy: Callable[[], Any], *, pin_memory: bool = True, **settings: Any) -> float:
    """Return the seconds of a step of `Trainer.fit` without callbacks."""
    timed, inputs = Timed(), samples(model)
    batch_size = len(inputs) // (WARM_UP + STEPS + 1)
    data = Data(train=TensorDataset(inputs), batch_size=batch_size, pin_memory=pin_memory)
    with tempfile.TemporaryDirectory() as folder:
        settings = {"log_every": f"{STEPS}step", "run_dir": folder, "evaluate_every": None, **settings}
        fit(strategy(), Squares(MODELS[model][0]()), data, timed, max_duration=f"{WARM_UP + STEPS}step", **settings)
    return timed.seconds


def plain_loop(model: str, *, pin_memory: bool = True, compiled: bool = False) -> float:
    """Return the seconds of a step that is written by hand."""
    task, inputs = Squares(MODELS[model][0]()).cuda(), samples(model)
    step = torch.compile(task.training_step) if compiled else task.training_step
    optimizer = torch.optim.SGD(task.parameters(), lr=1e-3, fused=True)
    batches = torch.utils.data.DataLoader(
        TensorDataset(inputs), batch_size=len(inputs) // (WARM_UP + STEPS + 1), pin_memory=pin_memory
    )
    started = 0.0
    for number, (batch,) in enumerate(batches):
        if number in (WARM_UP, WARM_UP + STEPS):
            torch.cuda.synchronize()
            started = time.perf_counter() - started
        optimizer.zero_grad()
        step([batch.to("cuda", non_blocking=True)]).backward()
        optimizer.step()
    return started / STEPS


def compare(title: str, contenders: dict[str, Callable[[], float]], rounds: int = ROUNDS) -> None:
    """Print and note the median seconds of a step, and ratios to the first; a contender that fails has none."""
    seconds: dict[str, list[float]] = {name: [] for name in contenders}
    for turn in range(rounds):
        for name in [*contenders][turn % len(contenders) :] + [*contenders][: turn % len(contenders)]:
            try:
                seconds[name].append(contenders[name]())
            except Exception as error:
                traceback.print_exc()
                failed(f"{title}: {name}", f"{type(error).__name__}: {error}")
                seconds[name].append(float("nan"))
    print(f"\n{title}, {rounds} rounds\n\n| contender | ms a step | ratio | least | most |\n|---|---|---|---|---|")
    for name, values in seconds.items():
        ratios = [value / first for value, first in zip(values, seconds[next(iter(seconds))], strict=True)]
        ratio = statistics.median(ratios)
        milliseconds = 1e3 * statistics.median(values)
        print(f"| {name} | {milliseconds:.3f} | {ratio:.3f} | {min(ratios):.3f} | {max(ratios):.3f} |", flush=True)
        if not math.isnan(ratio):
            figure(f"{title}: {name}", ratio)


def prefetching() -> None:
    """Compare batches that are copied from pinned memory ahead of a step, and from other memory."""
    single = partial(SingleStrategy, device="cuda")
    contenders = {
        "plain loop, pinned": partial(plain_loop, "mlp5"),
        "plain loop, not pinned": partial(plain_loop, "mlp5", pin_memory=False),
        "trainkit, pinned": partial(trained, "mlp5", single),
        "trainkit, not pinned": partial(trained, "mlp5", single, pin_memory=False),
    }
    compare("prefetch, a perceptron of 5 million parameters", contenders)


def ranks() -> None:
    """Compare the strategies with one NCCL rank: what they cost beside `single` where nothing is to be sent."""
    contenders = {name: partial(trained, "gpt4", partial(kind, device="cuda")) for name, kind in KINDS.items()}
    contenders["single"] = partial(trained, "gpt4", partial(SingleStrategy, device="cuda"))
    contenders["plain loop"] = partial(plain_loop, "gpt4")
    compare("one rank, a GPT of 4 million parameters", contenders)


def compiling() -> None:
    """Compare ways to compile; the first round fills the cache of the compiler."""
    single = partial(SingleStrategy, device="cuda")
    if REHEARSAL:  # what the compiler makes for CUDA does not run there
        ways: dict[str, Any] = {"eager": False, "aot_eager": {"backend": "aot_eager"}}
        contenders = {name: partial(trained, "gpt4", single, compile=way) for name, way in ways.items()}
    else:
        ways = {
            "trainkit, whole": True,
            "blocks": {"blocks": ["Block"]},
            "reduce-overhead": {"mode": "reduce-overhead"},
        }
        contenders = {"plain loop, compiled": partial(plain_loop, "gpt4", compiled=True)}
        contenders["trainkit, eager"] = partial(trained, "gpt4", single)
        contenders |= {name: partial(trained, "gpt4", single, compile=way) for name, way in ways.items()}
    compare("torch.compile, a GPT of 4 million parameters", contenders, rounds=min(ROUNDS, 2))


def waiting() -> None:
    """Count how often torch says that a step waits for the device, between two log points."""
    print("\n| strategy | waits of each step |\n|---|---|")
    for name, kind in {"single": SingleStrategy, **KINDS}.items():
        waits = CountWaits()
        data = Data(train=TensorDataset(samples("mlp5")), batch_size=32)
        with tempfile.TemporaryDirectory() as folder:
            settings = {"run_dir": folder, "log_every": "100step", "evaluate_every": None}
            fit(
                kind(device="cuda"),
                Squares(MODELS["mlp5"][0]()),
                data,
                waits,
                max_duration=f"{WARM_UP + 3}step",
                **settings,
            )
        print(f"| {name} | {waits.waits[2:-1]} |", flush=True)
        figure(f"waits a step: {name}", max(waits.waits[2:-1]))


def on_a_rank(name: str, rendezvous: str) -> None:
    """Run a part as the only rank of an NCCL group."""
    dist.destroy_process_group()
    dist.init_process_group("nccl", init_method=f"file://{rendezvous}", rank=0, world_size=1)
    PARTS[name]()


PARTS = {"waits": waiting, "prefetch": prefetching, "ranks": ranks, "compile": compiling}


def main() -> None:
    """Run every part in a process of its own, and gather what they print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, nargs="?")
    parser.add_argument("--part", choices=PARTS)
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.part is not None:
        if options.part in ("waits", "ranks"):
            with tempfile.TemporaryDirectory() as folder:
                run_ranks(on_a_rank, 1, options.part, f"{folder}/rendezvous", timeout=LIMIT)
        else:
            PARTS[options.part]()
        return
    commands = {}
    for title, (script, *arguments) in SCRIPTS.items():
        shown = [script, *arguments, "--device", "cuda"]
        commands[title] = [f"benchmarks/{script}", *shown[1:], *(IN_REHEARSAL[title] if REHEARSAL else ())]
    commands |= {name: ["-m", "tests.gpu.speed", "--part", name] for name in PARTS}
    versions = f"torch {torch.__version__}, CUDA {torch.version.cuda}, {os.cpu_count()} CPU cores"
    sections = [f"### {torch.cuda.get_device_name(0)}", versions]
    for title, command in commands.items():
        try:
            call = subprocess.run(
                [sys.executable, *command], cwd=ROOT, stdout=subprocess.PIPE, text=True, timeout=LIMIT, check=False
            )
            code, printed = call.returncode, call.stdout
        except subprocess.TimeoutExpired as error:
            code, printed = -1, (error.stdout or b"").decode()
        print(printed, flush=True)
        if code:
            failed(title, f"exit code {code} (-1: not within {LIMIT} s); see speed.log")
        tables = [line for line in printed.splitlines() if not line.startswith(("{", "["))]
        fence = [] if any(line.startswith("|") for line in tables) else ["```"]
        sections.append("\n".join([f"{title}: `python {' '.join(command)}`\n", *fence, *tables, *fence]))
        (options.folder / "RESULTS.md").write_text("\n\n".join(sections) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
