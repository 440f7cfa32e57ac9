"""A signal to any rank, at any moment: all ranks save once, stop after the same step, and end with its exit code."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from trainkit.callbacks.checkpoint import Checkpoint
from trainkit.strategies.ddp import DDPStrategy

from tests.program import wait_until
from tests.tasks import Regression, regression_data, sgd
from trainkit import Callback, Data, LRSchedule, TaskModule, Trainer
from trainkit.checkpoint.store import CheckpointStore, load_from
from trainkit.errors import Stopped
from trainkit.testing import run_ranks

NUM_STEPS = 400
STEPS_WITH_EVALUATIONS = 30  # every third step has one, which stops all ranks at the latest
TORCHRUN = ("RANK", "LOCAL_RANK", "WORLD_SIZE")


def on_plateau(task: nn.Module) -> Any:
    optimizer = sgd(task)
    plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.7, patience=0, threshold=1e9)
    return optimizer, LRSchedule(plateau, every="metric", metric="validation/loss")


class Interrupted(Regression):
    """Receives a signal in a batch of an evaluation, on one rank."""

    def __init__(self, *, receiver: int = -1, number: int = 0, evaluation: int = 0) -> None:
        super().__init__(on_plateau)
        self.receiver, self.number, self.evaluation = receiver, number, evaluation
        self.batches = 0

    def validation_step(self, batch: Any) -> Any:
        self.batches += 1
        if dist.get_rank() == self.receiver and self.batches == 3 * self.evaluation - 1:
            os.kill(os.getpid(), self.number)
        return super().validation_step(batch)

    def predict_step(self, batch: Any) -> Any:
        self.validation_step(batch)
        return batch[1]


class SendAt(Callback):
    def __init__(self, receiver: int, number: int, step: int) -> None:
        self.receiver, self.number, self.step = receiver, number, step

    def on_step_end(self, run: Any) -> None:
        if run.state.step == self.step and run.strategy.comm.rank == self.receiver:
            os.kill(os.getpid(), self.number)


class InSave(SendAt):
    """Sends it while the first checkpoint is being made."""

    def __init__(self, receiver: int, number: int) -> None:
        super().__init__(receiver, number, 0)

    def on_save(self, run: Any, payload: dict[str, Any]) -> None:
        if run.strategy.comm.rank == self.receiver and run.state.step == 5:
            os.kill(os.getpid(), self.number)


class Compiled(Interrupted):
    """Receives a signal on one rank while its forward is compiled."""

    def compile(self, *args: Any, **settings: Any) -> None:
        super().compile(backend=compile_slowly)


def compile_slowly(graph: Any, inputs: Any) -> Any:
    if dist.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGTERM)
    return graph.forward


def compile_on_ranks(folder: Path) -> tuple[int, str, int]:
    return fit(folder, Compiled(), compile=True)


def data() -> Data:
    evaluated = dict.fromkeys(("validation", "test", "predict"), regression_data(24))
    return Data(train=regression_data(40), **evaluated, batch_size=8, evaluation_batch_size=8)


@contextmanager
def slurm_job(folder: Path) -> Iterator[None]:
    """Have a `scontrol` that notes what it is asked for."""
    tools = folder / f"tools_{dist.get_rank()}"
    tools.mkdir()
    (tools / "scontrol").write_text(f'#!/bin/sh\necho "$@" >> {folder}/scontrol.txt\n')
    (tools / "scontrol").chmod(0o755)
    before = dict(os.environ)
    os.environ.update(PATH=f"{tools}:{before['PATH']}", SLURM_JOB_ID="4711")
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


def fit(
    folder: Path,
    task: TaskModule,
    *callbacks: Callback,
    num_steps: int = NUM_STEPS,
    evaluate_every: str = "3step",
    **settings: Any,
) -> tuple[int, str, int]:
    """Train until a signal ends it; return the exit code, its name and the step that the rank ended at."""
    last = SendAt(-1, 0, 0)
    saves = any(isinstance(callback, Checkpoint) for callback in callbacks)
    last.on_fit_end = lambda run: setattr(last, "step", run.state.step)  # type: ignore[method-assign]
    trainer = Trainer(
        DDPStrategy(device="cpu"),
        max_duration=f"{num_steps}step",
        evaluate_every=evaluate_every,
        callbacks=[*callbacks, *([] if saves else [Checkpoint(every=None, save_last_k=None, save_at_end=False)]), last],
        loggers=[],
        num_sanity_batches=0,
        run_dir=folder,
        **settings,
    )
    try:
        trainer.fit(task, data(), resume="auto")
    except Stopped as stopped:
        return stopped.exit_code, stopped.signal_name, last.step
    return 0, "", last.step


def evaluate(stage: str, task: TaskModule) -> tuple[int, str]:
    trainer = Trainer(DDPStrategy(device="cpu"), callbacks=[], loggers=[])
    try:
        getattr(trainer, stage)(task, data())
    except Stopped as stopped:
        return stopped.exit_code, stopped.signal_name
    return 0, ""


def on_two_ranks(folder: Path) -> dict[str, Any]:
    seen: dict[str, Any] = {}
    rarely = f"{NUM_STEPS}step"  # an evaluation would stop the other rank too
    seen["step"] = fit(folder / "step", Interrupted(), SendAt(1, signal.SIGTERM, 4), evaluate_every=rarely)
    receiving = Interrupted(receiver=1, number=signal.SIGTERM, evaluation=2)
    seen["evaluation"] = fit(folder / "evaluation", receiving, num_steps=STEPS_WITH_EVALUATIONS)
    seen["interrupt"] = fit(folder / "interrupt", Interrupted(receiver=0, number=signal.SIGINT, evaluation=1))
    for stage in ("predict", "test"):
        seen[stage] = evaluate(stage, Interrupted(receiver=1, number=signal.SIGTERM, evaluation=1))
    with slurm_job(folder):
        preemptible = {"preemption_signal": "SIGUSR1", "requeue": True, "num_steps": STEPS_WITH_EVALUATIONS}
        seen["preempted"] = fit(folder / "preempted", Interrupted(), SendAt(1, signal.SIGUSR1, 4), **preemptible)
        seen["terminated"] = fit(folder / "terminated", Interrupted(), SendAt(1, signal.SIGTERM, 4), **preemptible)
    seen["compilation"] = compile_on_ranks(folder / "compilation")
    seen["save"] = fit(folder / "save", Interrupted(), InSave(1, signal.SIGTERM), Checkpoint(every="5step"))
    seen["whole"] = fit(folder / "whole", Interrupted(), num_steps=STEPS_WITH_EVALUATIONS)
    weights = {}
    for name in ("whole", "evaluation", "preempted"):
        task = Interrupted()
        fit(folder / name, task, num_steps=STEPS_WITH_EVALUATIONS)
        weights[name] = task.network[0].weight.detach().clone()
    seen["weights"] = weights
    return seen


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("signals")


@pytest.fixture(scope="module")
def ranks(folder: Path) -> Any:
    return run_ranks(on_two_ranks, 2, folder)


def saved(folder: Path, name: str) -> list[tuple[int, str]]:
    return [(entry.step, entry.reason) for entry in CheckpointStore(folder / name / "checkpoints").entries()]


def test_a_signal_to_one_rank_stops_all_after_the_same_step_with_one_save(ranks, folder):
    first, second = ranks[0]["step"], ranks[1]["step"]
    assert first == second
    code, name, step = first
    assert (code, name) == (143, "SIGTERM")
    assert 4 <= step < NUM_STEPS
    assert saved(folder, "step") == [(step, "SIGTERM")]


@pytest.mark.parametrize(("name", "outcome"), [("evaluation", (143, "SIGTERM", 6)), ("interrupt", (130, "SIGINT", 3))])
def test_a_signal_in_an_evaluation_stops_all_ranks_before_another_step(ranks, folder, name, outcome):
    assert ranks[0][name] == ranks[1][name] == outcome
    assert saved(folder, name)[0] == (outcome[2], outcome[1])


def test_an_evaluation_interrupted_by_a_signal_is_repeated_with_the_same_weights(ranks):
    for rank in ranks:
        assert torch.equal(rank["weights"]["evaluation"], rank["weights"]["whole"])


@pytest.mark.parametrize("stage", ["predict", "test"])
def test_no_rank_returns_a_standalone_evaluation_interrupted_by_a_signal(ranks, stage):
    assert [rank[stage] for rank in ranks] == [(143, "SIGTERM")] * 2


def test_a_signal_during_a_compilation_stops_all_ranks_after_it(ranks, folder):
    code, name, step = ranks[0]["compilation"]
    assert ranks[1]["compilation"] == (code, name, step) == (143, "SIGTERM", step)
    assert 1 <= step < 10
    assert saved(folder, "compilation") == [(step, "SIGTERM")]


def test_a_signal_during_a_save_stops_all_ranks_after_it(ranks, folder):
    code, name, step = ranks[0]["save"]
    assert ranks[1]["save"] == (code, name, step) == (143, "SIGTERM", step)
    assert 5 <= step < NUM_STEPS
    assert saved(folder, "save")[-1][0] == step


def test_a_preemption_signal_saves_and_the_main_rank_requeues_the_job_once(ranks, folder):
    code, name, step = ranks[0]["preempted"]
    assert ranks[1]["preempted"] == (code, name, step) == (128 + signal.SIGUSR1, "SIGUSR1", step)
    assert saved(folder, "preempted")[0] == (step, "SIGUSR1")
    assert (folder / "scontrol.txt").read_text() == "requeue 4711\n"


def test_a_cancelled_job_is_not_requeued(ranks):
    assert ranks[0]["terminated"][:2] == ranks[1]["terminated"][:2] == (143, "SIGTERM")


def test_a_requeued_job_ends_with_the_weights_of_an_uninterrupted_run(ranks):
    for rank in ranks:
        assert torch.equal(rank["weights"]["preempted"], rank["weights"]["whole"])


SCRIPT = """
import os, sys
sys.path.insert(0, {here!r})
from tests.reliability.test_signals_on_ranks import *

class Pid(Callback):
    def on_step_end(self, run):
        if run.state.step == 5:
            path = Path(sys.argv[1]) / f"rank_{{run.strategy.comm.rank}}.part"
            path.write_text(str(os.getpid()))
            path.rename(path.with_suffix(".pid"))

if __name__ == "__main__":
    strategy = DDPStrategy(devices=2, device="cpu")
    settings = {{"callbacks": [Pid(), Checkpoint(every=None)], "loggers": [], "preemption_signal": "SIGUSR1"}}
    trainer = Trainer(strategy, max_duration="1000000step", run_dir=sys.argv[1] + "/run", **settings)
    trainer.fit(Interrupted(), data())
"""


@pytest.mark.slow
@pytest.mark.parametrize(("receiver", "name"), [("rank", "SIGTERM"), ("caller", "SIGUSR1")])
def test_a_signal_to_one_started_rank_or_the_caller_ends_all_with_its_exit_code(tmp_path, receiver, name):
    script = tmp_path / "train.py"
    script.write_text(SCRIPT.format(here=str(Path(__file__).parents[2])))
    environment = {key: value for key, value in os.environ.items() if key not in TORCHRUN}
    caller = subprocess.Popen(
        [sys.executable, str(script), str(tmp_path)], stderr=subprocess.PIPE, text=True, env=environment
    )
    try:
        files = [tmp_path / f"rank_{rank}.pid" for rank in range(2)]
        wait_until(
            lambda: all(file.exists() for file in files),
            runs=lambda: caller.poll() is None,
            said=lambda: caller.communicate(timeout=1)[1],
        )
        os.kill(caller.pid if receiver == "caller" else int(files[1].read_text()), signal.Signals[name])
        _, errors = caller.communicate(timeout=600)
    finally:
        caller.kill()
        caller.communicate()
    assert caller.returncode == 128 + signal.Signals[name], errors
    assert "Traceback" not in errors
    assert load_from(tmp_path / "run").entry.reason == name
