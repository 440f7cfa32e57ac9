"""ParityRuns: training runs of one task whose steps are recorded, one for each strategy."""

from __future__ import annotations

import copy
import inspect
import json
import math
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from trainkit import registry
from trainkit.callback import Callback
from trainkit.distributed.pickling import copied
from trainkit.errors import UserError
from trainkit.optim.precision import Precision
from trainkit.parity.causes import Records, StepObserver
from trainkit.rng import seed_everything
from trainkit.run import Run
from trainkit.strategy import Strategy
from trainkit.task import TaskModule
from trainkit.trainer import Trainer
from trainkit.tree import map_tensors

REFERENCE = "single"

StrategyChoice = str | Strategy | tuple[str, Mapping[str, Any]]
"""A strategy, or the name of one, alone or with settings."""


@runtime_checkable
class ReportsTraffic(Protocol):
    """A strategy that knows how many bytes it sends."""

    @property
    def bytes_a_step(self) -> int | None:
        """Bytes that this rank sends in a step."""


@dataclass(frozen=True)
class ParityRun:
    """The recorded steps of one training run, with the layout and traffic of its strategy."""

    folder: Path
    layout: str
    bytes_a_step: int | None
    num_steps: int

    @property
    def has_losses_of_fp32(self) -> bool:
        """True if every loss is representable in fp32: the step then computes it in fp32 for any input dtype."""
        losses = [loss for step in range(1, self.num_steps + 1) for loss in self.step(step)["losses"].values()]
        return all(float(torch.tensor(loss, dtype=torch.float32)) == loss for loss in losses if not math.isnan(loss))

    def step(self, number: int) -> dict[str, Any]:
        """Return the record of a step; 0 is the state before the first."""
        record: dict[str, Any] = torch.load(self.folder / f"{number}.pt", weights_only=True)
        return record


class ParityRuns:
    """Trains copies of one task in the same way."""

    def __init__(self, task: Any, data: Any, folder: Path, *, steps: int, settings: dict[str, Any]) -> None:
        self._task, self._data = task, data
        self._folder = folder
        self._settings = settings
        self.steps = steps
        # Copies: a function may return the same task each time, which the first run then trains.
        self._start = copy.deepcopy(self._make_task().state_dict())  # with extra states of modules, which are objects

    @property
    def precision(self) -> str:
        """The precision of all runs."""
        return Precision(self._settings.get("precision") or "fp32").name

    @property
    def names_precision(self) -> bool:
        """True if the settings have a precision."""
        return self._settings.get("precision") is not None

    def in_precision(self, name: str) -> ParityRuns:
        """Return the same runs in another precision."""
        # Of its own: both precisions record a run of the same name.
        folder = self._folder / name
        folder.mkdir()
        settings = {**self._settings, "precision": name}
        return ParityRuns(self._task, self._data, folder, steps=self.steps, settings=settings)

    def task(self) -> TaskModule:
        """Return a new task with the weights that all runs start from."""
        task = self._make_task()
        task.load_state_dict(self._start)
        return task

    def train(self, name: str, strategy: Strategy) -> ParityRun:
        """Train and record every step."""
        folder = self._folder / name
        folder.mkdir()
        self.fit(name, strategy, callbacks=[_StepRecorder(folder)], **self._logged)
        # From a file, since the recorder of rank 0 may be a copy in another process.
        report = json.loads((folder / "strategy.json").read_text())
        return ParityRun(folder, report["layout"], report["bytes_a_step"], self.steps)

    def observe(self, name: str, strategy: Strategy, step: int) -> Records:
        """Train up to a step as `train` does, and return what each rank has observed in it."""
        path = self._folder / f"step {step} of {name}.pt"
        self.fit(f"{name} up to step {step}", strategy, callbacks=[StepObserver(step, path)], **self._logged)
        records: Records = torch.load(path, weights_only=True)
        return records

    @property
    def _logged(self) -> dict[str, Any]:
        # A limit logs the gradient norm; one of infinity changes nothing.
        limited = any(self._settings.get(limit) is not None for limit in ("max_grad_norm", "max_grad_value"))
        norm: dict[str, Any] = {} if limited else {"max_grad_norm": math.inf}
        # Every step is logged, as the recorder takes losses and norms from the log.
        return {"log_every": "1step", **norm}

    def fit(
        self, name: str, strategy: Strategy, *, callbacks: list[Callback], resume: bool = False, **more: Any
    ) -> dict[str, Any]:
        """Train and return the task's state, tensors in host memory; `more` replaces settings of all runs."""
        run_dir = self._folder / f"run of {name}"
        # The number of steps alone ends the run.
        settings = self._settings | {"evaluate_every": None, "num_sanity_batches": 0} | more
        settings |= {
            "max_duration": f"{self.steps}step",
            "callbacks": callbacks,
            "loggers": [],
            "report": False,
            "run_dir": run_dir,
        }
        task = self.task()
        # A function or class makes new data for each run; data alone is used by all of them.
        data: Any = self._data() if inspect.isroutine(self._data) or inspect.isclass(self._data) else self._data
        trainer = Trainer(strategy, **settings)
        trainer.fit(task, data, resume=run_dir if resume else None)
        return {key: map_tensors(value, _on_host) for key, value in task.state_dict().items()}

    def _make_task(self) -> TaskModule:
        # A constructor that draws weights must draw the same ones for every strategy.
        seed_everything(int(self._settings.get("seed", 0)))
        task = copied(self._task) if isinstance(self._task, nn.Module) else self._task()
        if not isinstance(task, TaskModule):
            raise UserError(f"the task is a {type(task).__name__}; subclass trainkit.TaskModule.")
        return task


class _StepRecorder(Callback):
    """Writes what is compared after every step into a folder, from rank 0."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.metrics: dict[str, float] = {}
        self.before = 0.0

    def on_fit_start(self, run: Run) -> None:
        self._write(run)

    def on_log(self, run: Run, metrics: dict[str, float]) -> None:
        self.metrics = {name: float(value) for name, value in metrics.items()}

    def on_step_complete(self, run: Run) -> None:
        self._write(run)
        # A phase that does not run in the next step must not show its last values again.
        self.metrics = {}

    def on_fit_end(self, run: Run) -> None:
        strategy, plan = run.strategy, run.plan
        layout = f"{strategy.comm.world_size} x pre-batched"
        if plan is not None:
            layout = f"{plan.world_size} x {plan.micro_batches} x {plan.micro_batch_size}"
        sent = strategy.bytes_a_step if isinstance(strategy, ReportsTraffic) else None
        report = {"layout": layout, "bytes_a_step": sent}
        if run.is_main:
            (self.folder / "strategy.json").write_text(json.dumps(report))

    def _write(self, run: Run) -> None:
        # The time of a step without the time of writing it.
        seconds = time.perf_counter() - self.before
        weights = run.strategy.state_dict(run.task)  # collective
        if run.is_main:
            record = {
                "weights": {name: _on_host(value) for name, value in weights.items() if isinstance(value, Tensor)},
                "losses": self._logged(run, "loss"),
                "norms": self._logged(run, "grad_norm"),
                "seconds": seconds,
            }
            torch.save(record, self.folder / f"{run.state.step}.pt")
        self.before = time.perf_counter()

    def _logged(self, run: Run, name: str) -> dict[str, float]:
        """Return the logged value of each phase; NaN if the phase did not run in the step."""
        phases = [phase_optimizer.phase for phase_optimizer in run.phase_optimizers]
        keys = {phase: f"train/{phase}/{name}" if phase else f"train/{name}" for phase in phases}
        return {phase: self.metrics.get(key, math.nan) for phase, key in keys.items()}


class StopAfterStep(Callback):
    """Saves a checkpoint after a step and ends the run."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_step_complete(self, run: Run) -> None:
        if run.state.step == self.step:
            run.checkpointer.save(reason="assert_resume_exact")
            run.request_stop("assert_resume_exact")


def _on_host(tensor: Tensor) -> Tensor:
    return tensor.detach().cpu()


def strategy_name(item: StrategyChoice) -> str:
    """Return the name of a strategy in a report."""
    if isinstance(item, Strategy):
        return type(item).__name__
    return item if isinstance(item, str) else item[0]


def make_strategy(item: StrategyChoice, devices: int, device: str) -> Strategy:
    """Return a strategy; one that is named gets the devices if it takes any."""
    if isinstance(item, Strategy):
        return item
    name, typed_settings = (item, {}) if isinstance(item, str) else item
    strategy: Strategy = registry.make("strategy", name)
    takes = inspect.signature(type(strategy)).parameters
    # A strategy of one process has no `device`: it takes a list of devices.
    several = [device] * devices if "device" not in takes and device == "cpu" else devices
    settings = {"device": device, "devices": several, "stages": devices}
    return type(strategy)(**{key: value for key, value in settings.items() if key in takes} | dict(typed_settings))
