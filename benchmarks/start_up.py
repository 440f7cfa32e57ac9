"""Time from the command to the end of the first training step.

    python benchmarks/start_up.py [--rounds 5] [--only plain,ddp,fusion,pipeline,lightning,accelerate,commands]

Every contender is a command that trains a small network on scikit-learn's digits with AdamW, on one CPU thread. The
first optimizer step of the main rank writes the time, and the command is then ended. `plain` is a hand-written loop.
Frameworks that are not installed are skipped. A round runs each contender once, in rotating order; the table shows
medians of the wall-clock time and of the ratios to `single` within rounds, with quartiles. `commands` are timed whole.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

MARK = "START_UP_MARK"  # environment variable: the file to which the time is written


def mark() -> None:
    """Write the time of the first step."""
    path = Path(os.environ[MARK])
    if not path.exists():
        path.with_suffix(".new").write_text(str(time.time()))
        path.with_suffix(".new").rename(path)


def plain() -> None:
    """Train with a hand-written loop."""
    import torch

    network, loader = _network_and_loader()
    optimizer = torch.optim.AdamW(network.parameters(), lr=3e-3)
    for images, labels in loader:
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(network(images), labels).backward()
        optimizer.step()
        mark()


def lightning(devices: int) -> None:
    """Train with Lightning, under DDP if there are several devices."""
    import lightning
    import torch

    network, loader = _network_and_loader()

    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.network = network

        def training_step(self, batch: Any, index: int) -> Any:
            return torch.nn.functional.cross_entropy(self.network(batch[0]), batch[1])

        def configure_optimizers(self) -> Any:
            return torch.optim.AdamW(self.parameters(), lr=3e-3)

        def on_train_batch_end(self, *_: Any) -> None:
            if self.global_rank == 0:
                mark()

    settings: Any = {"strategy": "ddp"} if devices > 1 else {}
    with tempfile.TemporaryDirectory() as folder:
        lightning.Trainer(accelerator="cpu", devices=devices, max_steps=1, default_root_dir=folder, **settings).fit(
            Module(), loader
        )


def accelerate() -> None:
    """Train with Accelerate; its launcher starts the ranks."""
    import torch
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    network, loader = _network_and_loader()
    network, optimizer, loader = accelerator.prepare(network, torch.optim.AdamW(network.parameters(), lr=3e-3), loader)
    for images, labels in loader:
        optimizer.zero_grad()
        accelerator.backward(torch.nn.functional.cross_entropy(network(images), labels))
        optimizer.step()
        if accelerator.is_main_process:
            mark()


def _network_and_loader() -> tuple[Any, Any]:
    import torch
    from sklearn.datasets import load_digits
    from torch import nn
    from torch.utils.data import DataLoader, TensorDataset

    torch.set_num_threads(1)
    layers = [nn.Conv2d(1, 32, 3, padding=1), nn.ReLU(), nn.Flatten(), nn.Linear(32 * 64, 10)]
    pixels, labels = load_digits(return_X_y=True)
    images = torch.tensor(pixels, dtype=torch.float32).view(-1, 1, 8, 8) / 16
    return nn.Sequential(*layers), DataLoader(TensorDataset(images, torch.tensor(labels)), batch_size=64, shuffle=True)


def contenders() -> dict[str, list[str]]:
    """Return the command of each contender that can run here."""
    here = str(Path(__file__).resolve())
    fit = [
        sys.executable,
        "-m",
        "trainkit",
        "fit",
        "recipe=digits",
        "run_dir=RUN_DIR",
        "+callbacks.mark._target_=start_up.Mark",
    ]
    commands = {"plain": [sys.executable, here, "--contender", "plain"], "single": [*fit, "strategy=single"]}
    for ranks in (2, 4):
        for name, key in (("ddp", "devices"), ("fusion", "devices"), ("pipeline", "stages")):
            commands[f"{name}, {ranks} ranks"] = [*fit, f"strategy={name}", f"strategy.{key}={ranks}"]
    if importlib.util.find_spec("lightning"):
        for ranks in (1, 2):
            commands[f"lightning, {ranks} ranks"] = [
                sys.executable,
                here,
                "--contender",
                "lightning",
                "--devices",
                str(ranks),
            ]
    if importlib.util.find_spec("accelerate"):
        launch = [
            sys.executable,
            "-m",
            "accelerate.commands.launch",
            "--cpu",
            "--num_machines",
            "1",
            "--mixed_precision",
            "no",
        ]
        commands["accelerate, 2 ranks"] = [
            *launch,
            "--num_processes",
            "2",
            here,
            "--contender",
            "accelerate",
        ]
    return commands


def seconds_to_first_step(command: list[str]) -> float:
    """Return the seconds from the start of the command to its first step, and end it."""
    with tempfile.TemporaryDirectory() as folder:
        file, log = Path(folder) / "mark", Path(folder) / "log"
        environment = os.environ | {MARK: str(file), "OMP_NUM_THREADS": "1", "PYTHONPATH": str(Path(__file__).parent)}
        start = time.time()
        with log.open("w") as output:
            process = subprocess.Popen(
                [part.replace("RUN_DIR", f"{folder}/run") for part in command],
                env=environment,
                stdout=output,
                stderr=output,
                start_new_session=True,
                cwd=folder,
            )
        while process.poll() is None and not file.exists():
            time.sleep(0.005)
        for number in (signal.SIGTERM, signal.SIGKILL):
            try:
                os.killpg(process.pid, number)
                process.wait(5)
            except (ProcessLookupError, subprocess.TimeoutExpired):
                pass
        if not file.exists():
            raise RuntimeError(f"{' '.join(command)} made no step:\n{log.read_text()[-2000:]}")
        return float(file.read_text()) - start


def seconds_of(command: list[str]) -> float:
    """Return the seconds of a whole command."""
    start = time.time()
    subprocess.run(command, check=False, capture_output=True)
    return time.time() - start


def main() -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n", maxsplit=1)[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--only", default="")
    parser.add_argument("--contender", default="")
    parser.add_argument("--devices", type=int, default=1)
    arguments = parser.parse_args()
    if arguments.contender:
        return lightning(arguments.devices) if arguments.contender == "lightning" else globals()[arguments.contender]()
    chosen = arguments.only.split(",") if arguments.only else []
    commands = {n: c for n, c in contenders().items() if not chosen or n == "single" or n.partition(",")[0] in chosen}
    seconds: dict[str, list[float]] = {name: [] for name in commands}
    names = list(commands)
    for round_ in range(arguments.rounds):
        for k in range(len(names)):
            name = names[(k + round_) % len(names)]
            seconds[name].append(seconds_to_first_step(commands[name]))
    print("| contender | seconds to the first step | ratio to `single` | quartiles |\n|---|---|---|---|")
    for name, values in seconds.items():
        ratios = [value / single for value, single in zip(values, seconds["single"], strict=True)]
        low, middle, high = statistics.quantiles(ratios, n=4) if len(ratios) > 1 else ratios * 3
        print(f"| {name} | {statistics.median(values):.2f} | {middle:.2f} | {low:.2f}-{high:.2f} |")
    if not chosen or "commands" in chosen:
        print("\n| command | seconds |\n|---|---|")
        for name, command in {
            "`trainkit --help`": ["--help"],
            "a wrong key": ["fit", "recipe=digits", "trainer.max_duratio=1step"],
        }.items():
            times = [seconds_of([sys.executable, "-m", "trainkit", *command]) for _ in range(arguments.rounds)]
            print(f"| {name} | {statistics.median(times):.2f} |")


if __name__ == "__main__":
    main()
else:
    from trainkit import Callback

    class Mark(Callback):
        """Writes the time of the first step."""

        def on_step_end(self, run: Any) -> None:
            """Write the time on the main rank."""
            if run.is_main and run.state.step == 1:
                mark()
