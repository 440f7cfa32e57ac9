"""A training process is killed again and again, half of the time while it saves, and ends with the weights of one run.

TRAINKIT_KILLS=200 kills as often (`make torture`); TRAINKIT_TORTURE_DEVICE=cuda trains on a GPU.
"""

import json
import os
import random
import select
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TextIO

import pytest
import torch
from torch import nn
from torch.utils.data import Dataset
from trainkit.callbacks.checkpoint import Checkpoint
from trainkit.strategies.single import SingleStrategy

from tests.program import Program
from trainkit import Callback, Data, LRSchedule, TaskModule, Trainer
from trainkit.checkpoint.store import CheckpointStore, load_from
from trainkit.loggers.jsonl import JsonlLogger

KILLS = int(os.environ.get("TRAINKIT_KILLS", "12"))
DEVICE = os.environ.get("TRAINKIT_TORTURE_DEVICE", "cpu")
STEPS = 36
MOST_LIVES = 40  # of one run; a run that is not finished by then makes no progress


class Noisy(Dataset):
    def __init__(self, num_samples: int) -> None:
        self.inputs = torch.randn(num_samples, 4, generator=torch.Generator().manual_seed(0))

    def __len__(self) -> int:
        return len(self.inputs)

    def get_sample(self, index: int, seed: int) -> Any:
        noise = torch.randn(4, generator=torch.Generator().manual_seed(seed))
        return self.inputs[index] + 0.1 * noise, self.inputs[index].sum(0, keepdim=True)


class Regression(TaskModule):
    """Everything of it that a resume must restore: dropout, momentum, two schedules, batch statistics."""

    def __init__(self) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            self.network = nn.Sequential(
                nn.Linear(4, 64), nn.BatchNorm1d(64), nn.Tanh(), nn.Dropout(0.3), nn.Linear(64, 1)
            )

    def training_step(self, batch: Any) -> Any:
        return nn.functional.mse_loss(self.network(batch[0]), batch[1])

    validation_step = training_step

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.01)
        by_step = torch.optim.lr_scheduler.StepLR(optimizer, 7, gamma=0.95)
        plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.9, patience=0)
        return optimizer, [by_step, LRSchedule(plateau, every="metric", metric="validation/loss")]


class Reporter(Callback):
    """Reports to the parent where training starts and when it saves."""

    def __init__(self, report: Callable[[str], None]) -> None:
        self.report = report

    def on_fit_start(self, run: Any) -> None:
        self.report(f"started {run.state.step}")

    def on_save(self, run: Any, payload: dict[str, Any]) -> None:
        self.report("saving")


class ReportingStore(CheckpointStore):
    """Reports when a checkpoint has been listed."""

    report: Callable[[str], None]

    def save(self, payload: Any, **keywords: Any) -> Any:
        entry = CheckpointStore.original_save(self, payload, **keywords)  # type: ignore[attr-defined]
        ReportingStore.report(f"saved {keywords['step']}")
        return entry


def train(run_dir: Path, report: Callable[[str], None], *, background: bool) -> None:
    ReportingStore.report = report
    CheckpointStore.original_save = CheckpointStore.save  # type: ignore[attr-defined]
    CheckpointStore.save = ReportingStore.save  # type: ignore[method-assign]
    saving = Checkpoint(
        every="3step", monitor="validation/loss", save_last_k=2, save_on_exception=False, async_save=background
    )
    trainer = Trainer(
        SingleStrategy(device=DEVICE),
        max_duration=f"{STEPS}step",
        evaluate_every="5step",
        log_every="3step",
        callbacks=[Reporter(report), saving],
        loggers=[JsonlLogger()],
        run_dir=run_dir,
    )
    trainer.fit(Regression(), Data(train=Noisy(50), validation=Noisy(12), batch_size=8), resume="auto")


# ---- The process that forks the trainers


def forever() -> None:
    for line in sys.stdin:
        order = json.loads(line)
        print(json.dumps(one_life(Path(order["run_dir"]), order["background"], order["kill"])), flush=True)


def one_life(run_dir: Path, background: bool, kill: tuple[int, float] | None) -> dict[str, Any]:
    """Train until the end, or until the kill: so many seconds after the n-th save began, or after the start (0)."""
    receiver, sender = os.pipe()
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            os.close(receiver)
            # The first call after a fork makes new threads, and aborts if two threads of backward make it at once.
            torch.set_num_threads(1)
            train(run_dir, lambda word: os.write(sender, f"{word}\n".encode()), background=background)
            code = 0
        except BaseException:
            os.write(sender, ("failed " + json.dumps(traceback.format_exc()) + "\n").encode())
        finally:
            os._exit(code)
    os.close(sender)
    try:
        return watch(pid, receiver, kill)
    finally:
        os.close(receiver)


def watch(pid: int, receiver: int, kill: tuple[int, float] | None) -> dict[str, Any]:
    words, moment = b"", None
    if kill is not None and kill[0] == 0:
        moment = time.monotonic() + kill[1]
    while True:
        left = None if moment is None else max(0.0, moment - time.monotonic())
        ready, _, _ = select.select([receiver], [], [], left)
        if not ready:
            os.kill(pid, signal.SIGKILL)
            moment = None
            continue
        more = os.read(receiver, 65536)
        words += more
        if not more:
            break
        if kill is not None and 0 < kill[0] == words.count(b"saving"):
            moment, kill = time.monotonic() + kill[1], None
    _, status = os.waitpid(pid, 0)
    lines = words.decode().splitlines()
    return {
        "exit": os.waitstatus_to_exitcode(status),
        "started": next((int(line.split()[1]) for line in lines if line.startswith("started")), None),
        "saved": max((int(line.split()[1]) for line in lines if line.startswith("saved")), default=None),
        "died_saving": bool(lines) and lines[-1] == "saving",
        "error": next((json.loads(line[7:]) for line in lines if line.startswith("failed")), None),
    }


# ---- The tests


class Trainers:
    def __init__(self, program: Program, orders: TextIO, answers: TextIO) -> None:
        self._program, self._orders, self._answers = program, orders, answers

    def live(self, run_dir: Path, *, background: bool, kill: tuple[int, float] | None = None) -> dict[str, Any]:
        order = {"run_dir": str(run_dir), "background": background, "kill": kill}
        print(json.dumps(order), file=self._orders, flush=True)
        answer = self._answers.readline()
        assert answer, f"the forking process ended with {self._program.wait()}"
        outcome: dict[str, Any] = json.loads(answer)
        assert outcome["error"] is None, outcome["error"]
        assert outcome["exit"] in (0, -signal.SIGKILL)
        return outcome


@pytest.fixture(scope="module")
def trainers() -> Iterator[Trainers]:
    (standard_input, orders), (answers, standard_output) = os.pipe(), os.pipe()
    with Program(forever, streams=(standard_input, standard_output, 2)) as program:
        for descriptor in (standard_input, standard_output):
            os.close(descriptor)
        with os.fdopen(orders, "w") as to, os.fdopen(answers) as back:
            yield Trainers(program, to, back)


@pytest.fixture(scope="module")
def whole(trainers: Trainers, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, float]:
    """The folder of a run that nothing interrupted, and the seconds that it took."""
    folder, start = tmp_path_factory.mktemp("torture") / "whole", time.monotonic()
    assert trainers.live(folder, background=False)["exit"] == 0
    return folder, time.monotonic() - start


def lines_of(run_dir: Path) -> list[dict[str, Any]]:
    lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    return [{name: value for name, value in line.items() if name != "time"} for line in lines]


def assert_same(actual: Any, expected: Any, place: str = "") -> None:
    if isinstance(expected, dict):
        assert list(actual) == list(expected), place
        for key in expected:
            assert_same(actual[key], expected[key], f"{place}.{key}")
    elif isinstance(expected, list | tuple):
        assert len(actual) == len(expected), place
        for index, pair in enumerate(zip(actual, expected, strict=True)):
            assert_same(*pair, f"{place}[{index}]")
    elif isinstance(expected, torch.Tensor):
        assert torch.equal(actual, expected), place
    elif not place.endswith(".seconds"):
        assert actual == expected, place


def next_kill(number: int, draw: random.Random, seconds: float) -> tuple[int, float]:
    """Return when to kill: every fourth time as soon as a save begins, or soon after, or at any time of the run."""
    if number % 2:
        return 0, draw.uniform(0, seconds / 2)
    return draw.randint(1, 6), 0.0 if number % 4 == 0 else draw.uniform(0, 0.03)


def live_and_die(trainers: Trainers, run_dir: Path, draw: random.Random, seconds: float, *, most: int) -> list[Any]:
    """Train one run to its end through at most so many kills; return the outcome of each life that was ended."""
    background, least, ended = draw.random() < 0.5, 0, []
    for _ in range(MOST_LIVES):
        kill: tuple[int, float] | None = None
        if len(ended) < most:
            kill = next_kill(KILLS - most + len(ended), draw, seconds)
        outcome = trainers.live(run_dir, background=background, kill=kill)
        if outcome["started"] is not None:
            assert outcome["started"] >= least, "more was lost than the work since the last complete checkpoint"
            least = max(least, outcome["saved"] or 0)
        if outcome["exit"] == 0:
            return ended
        ended.append(outcome)
        store = CheckpointStore(run_dir / "checkpoints")
        for entry in store.entries() if store.folder.is_dir() else []:
            store.verify(entry)
    raise AssertionError(f"not finished after {MOST_LIVES} lives")


@pytest.mark.timeout(600 + 20 * KILLS)
def test_a_run_killed_at_any_instants_ends_with_the_weights_of_one_that_was_not(
    trainers: Trainers, whole: tuple[Path, float], tmp_path: Path
) -> None:
    folder, seconds = whole
    expected, expected_lines = load_from(folder).payload, lines_of(folder)
    draw = random.Random(KILLS)
    ended: list[Any] = []
    while len(ended) < KILLS:
        run_dir = tmp_path / f"run_{len(ended)}"
        ended += live_and_die(trainers, run_dir, draw, seconds, most=KILLS - len(ended))
        loaded = load_from(run_dir)
        assert not loaded.skipped
        del loaded.payload["callbacks"], loaded.payload["config"]
        assert_same(loaded.payload, {key: expected[key] for key in loaded.payload})
        assert lines_of(run_dir) == expected_lines
    assert sum(outcome["died_saving"] for outcome in ended) >= KILLS // 6, "the kills did not hit saves"
    assert any(outcome["saved"] for outcome in ended)
