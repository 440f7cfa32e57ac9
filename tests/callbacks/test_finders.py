"""The learning-rate finder and the micro-batch finder: what they suggest, and that they leave nothing behind."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR, OneCycleLR
from trainkit.callbacks.chart import chart
from trainkit.callbacks.learning_rate_finder import LearningRateFinder, suggest
from trainkit.callbacks.micro_batch_finder import MicroBatchFinder
from trainkit.strategies.ddp.strategy import DDPStrategy
from trainkit.strategies.dp.strategy import DataParallelStrategy
from trainkit.strategies.fusion.strategy import FusionStrategy
from trainkit.strategies.pipeline.strategy import Pipeline
from trainkit.strategies.single import SingleStrategy
from trainkit.strategies.torch_ddp import TorchDDPStrategy

from tests.tasks import Recorder, Regression, assert_same_bits, regression_data, weights
from trainkit import Callback, Data, Phase, Strategy, Trainer, UserError
from trainkit.testing import run_ranks


def adamw(task: nn.Module) -> Any:
    return torch.optim.AdamW(task.parameters(), lr=0.01)


class Model(Regression):
    """With dropout, batch norm and an optimizer that keeps a state; memory ends at `most` samples."""

    def __init__(self, optimizer: Any = adamw, most: int = 10**6) -> None:
        super().__init__(optimizer, hidden=5, dropout=0.3)
        self.norm = nn.BatchNorm1d(4)
        self.most = most

    def forward(self, inputs: Tensor) -> Tensor:
        if len(inputs) > self.most:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return super().forward(self.norm(inputs))


def data(batch_size: int = 8) -> Data:
    return Data(train=regression_data(40), batch_size=batch_size)


FINDERS = {
    "learning rate": lambda: LearningRateFinder(steps=12, then="continue"),
    "micro-batch": lambda: MicroBatchFinder(then="continue"),
}


@pytest.mark.parametrize("finder", FINDERS)
@pytest.mark.parametrize("settings", [{}, {"precision": "fp16-mixed"}, {"on_nonfinite": "skip"}], ids=str)
def test_training_after_a_look_is_training_without_one_to_the_bit(
    make_trainer: Any, finder: str, settings: dict[str, Any]
) -> None:
    looked, plain = Model(), Model()

    make_trainer(callbacks=[FINDERS[finder]()], max_duration="2epoch", **settings).fit(looked, data())
    make_trainer(max_duration="2epoch", **settings).fit(plain, data())

    assert_same_bits(looked, plain)


def test_norms_of_a_look_are_not_in_the_average_that_tells_spikes(make_trainer: Any) -> None:
    class Averages(Callback):
        def on_fit_start(self, run: Any) -> None:
            self.seen = run.optimization.spikes.state_dict()

    averages = Averages()
    finder = LearningRateFinder(steps=12, then="continue")
    make_trainer(callbacks=[finder, averages], spike_factor=10.0).fit(Model(), data())
    assert averages.seen == {}


def test_a_look_leaves_nothing_behind_on_several_devices_of_one_process(make_trainer: Any, tmp_path: Path) -> None:
    looked, plain = Model(), Model()
    finder = MicroBatchFinder(then="continue")
    finders = [LearningRateFinder(steps=10, then="continue"), finder]

    trainer = make_trainer(DataParallelStrategy(devices=["cpu", "cpu"]), callbacks=finders, max_duration="3step")
    trainer.fit(looked, data())
    make_trainer(DataParallelStrategy(devices=["cpu", "cpu"]), max_duration="3step").fit(plain, data())

    assert_same_bits(looked, plain)
    assert finder.suggestion in (2, 4, 8)


STRATEGIES: dict[str, Callable[[], Strategy]] = {
    "ddp": lambda: DDPStrategy(device="cpu"),
    "torch_ddp": lambda: TorchDDPStrategy(device="cpu"),
    "fusion": lambda: FusionStrategy(device="cpu"),
    "pipeline": lambda: Pipeline(stages=2, device="cpu", accumulate=2),
}


def look_on_two_ranks(folder: Path) -> dict[str, Any]:
    """Return for each strategy the weights with and without a look, and what was suggested."""
    found: dict[str, Any] = {}
    settings: dict[str, Any] = {"max_duration": "3step", "loggers": [], "sanity_batches": 0}
    for name, strategy in STRATEGIES.items():
        looked, plain, by_size = Model(), Model(), MicroBatchFinder(then="continue")
        finders: list[Callback] = [LearningRateFinder(steps=10, then="continue")]
        finders.append(by_size)
        Trainer(strategy(), callbacks=finders, run_dir=folder / name, **settings).fit(looked, data())
        Trainer(strategy(), callbacks=[], run_dir=folder / f"{name}_plain", **settings).fit(plain, data())
        found[name] = weights(looked), weights(plain), by_size.suggestion
    looked, plain, by_size = InPhases(), InPhases(), MicroBatchFinder(then="continue")
    finders = [LearningRateFinder(steps=10, then="continue", phase="second"), by_size]
    Trainer(DDPStrategy(device="cpu"), callbacks=finders, run_dir=folder / "phases", **settings).fit(looked, data())
    Trainer(DDPStrategy(device="cpu"), run_dir=folder / "phases_plain", **settings).fit(plain, data())
    found["phases"] = weights(looked), weights(plain), by_size.suggestion
    return found


@pytest.mark.slow
def test_a_look_leaves_nothing_behind_on_several_ranks(tmp_path: Path) -> None:
    first, second = run_ranks(look_on_two_ranks, 2, tmp_path)

    for name in (*STRATEGIES, "phases"):
        for looked, plain, _ in (first[name], second[name]):
            assert_same_bits(looked, plain)
        assert len(json.loads((tmp_path / name / "learning_rates.json").read_text())["losses"]) == 10
        assert first[name][2] == second[name][2]
        assert first[name][2] in (2, 4)
    tried = json.loads((tmp_path / "pipeline" / "micro_batches.json").read_text())["samples_per_second"]
    assert list(tried) == ["2", "4"]  # what was set, and its half


# ---- Learning rates


def test_the_suggestion_is_where_the_loss_falls_most_steeply() -> None:
    """A loss that falls like a logistic curve around 1e-3 and explodes from 1e-1 on."""
    rates = [10 ** (-6 + 6 * number / 99) for number in range(100)]
    losses = [1 / (1 + (rate / 1e-3) ** 2) + (rate / 0.3) ** 4 for rate in rates]

    found = suggest(rates, losses)

    assert found is not None
    assert 3e-4 < found < 5e-3


@pytest.mark.parametrize("losses", [[1.0] * 50, [1.0 + n for n in range(50)], [math.nan] * 50, [1.0]])
def test_where_the_loss_does_not_fall_there_is_no_suggestion(losses: list[float]) -> None:
    assert suggest([10.0 ** (n / 10) for n in range(len(losses))], losses) is None


def test_a_look_ends_the_run_with_a_plot_and_the_numbers(make_trainer: Any, tmp_path: Path) -> None:
    finder = LearningRateFinder(lowest=1e-5, highest=10.0, steps=60)

    result = make_trainer(callbacks=[finder], run_dir=tmp_path).fit(Model(), data())

    kept = json.loads((tmp_path / "learning_rates.json").read_text())
    assert result.steps == 0
    assert result.exit_reason.startswith("learning_rate_finder has looked")
    assert kept["suggestion"] == finder.suggestion
    assert finder.suggestion is not None
    assert 1e-4 < finder.suggestion < 1.0
    assert kept["rates"][0] == 1e-5
    assert ElementTree.parse(tmp_path / "learning_rates.svg").getroot().tag.endswith("svg")


def test_the_trial_ends_when_the_loss_explodes(make_trainer: Any, tmp_path: Path) -> None:
    task = Regression(lambda task: torch.optim.SGD(task.parameters(), lr=0.01))
    make_trainer(callbacks=[LearningRateFinder(lowest=1e-3, highest=10.0, steps=60)], run_dir=tmp_path).fit(
        task, data()
    )

    losses = json.loads((tmp_path / "learning_rates.json").read_text())["losses"]
    assert 10 < len(losses) < 60
    assert None not in losses and losses[-1] > 4 * min(losses)  # not only when nothing is finite any more


@pytest.mark.parametrize("schedule", ["lambda", "one cycle"])
def test_the_suggestion_is_applied_as_if_it_had_been_set(make_trainer: Any, schedule: str) -> None:
    def build(rate: float) -> Any:
        def configure(task: Any) -> Any:
            first, second = list(task.parameters())[:2], list(task.parameters())[2:]
            groups = [{"params": first}, {"params": second, "lr": rate / 10}]
            optimizer = torch.optim.AdamW(groups, lr=rate)
            if schedule == "lambda":
                return optimizer, LambdaLR(optimizer, lambda step: 1 / (1 + step))
            return optimizer, OneCycleLR(optimizer, max_lr=[rate, rate / 10], total_steps=20)

        return configure

    def rates(task: Regression, *callbacks: Callback) -> list[list[float]]:
        seen: list[list[float]] = []

        class Looks(Callback):
            def on_step_end(self, run: Any) -> None:
                seen.append(run.optimizations[0].learning_rates())

        make_trainer(callbacks=[*callbacks, Looks()], max_duration="2epoch").fit(task, data())
        return seen

    finder = LearningRateFinder(lowest=1e-5, highest=10.0, steps=60, then="apply")
    applied = rates(Model(build(0.01)), finder)
    assert finder.suggestion is not None
    expected = rates(Model(build(finder.suggestion)))

    for one, other in zip(applied, expected, strict=True):
        assert one == pytest.approx(other, rel=1e-9)


def test_a_resumed_run_does_not_look_again(make_trainer: Any, tmp_path: Path) -> None:
    make_trainer(callbacks=["checkpoint"], run_dir=tmp_path, max_duration="2step").fit(Model(), data())
    finder = LearningRateFinder()

    make_trainer(callbacks=[finder], run_dir=tmp_path, max_duration="4step").fit(Model(), data(), resume=tmp_path)

    assert finder.suggestion is None


# ---- Micro-batches


def test_the_largest_size_that_fits_is_found_and_the_global_batch_stays(
    make_trainer: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every size takes the same time, so that the largest that fits is the quickest."""
    monkeypatch.setattr(MicroBatchFinder, "_seconds", timed(MicroBatchFinder._seconds))
    finder, recorder = MicroBatchFinder(), Recorder()
    looked, plain = Model(most=5), Model()

    make_trainer(callbacks=[finder, recorder], run_dir=tmp_path).fit(looked, data(20))
    make_trainer(SingleStrategy(device="cpu", micro_batch_size=4)).fit(plain, data(20))

    kept = json.loads((tmp_path / "micro_batches.json").read_text())
    assert finder.suggestion == kept["suggestion"] == 4
    assert kept["out_of_memory"] is True
    assert list(kept["samples_per_second"]) == ["2", "4"]
    assert str(recorder.run.plan) == "global batch 20 = 1 rank x 5 micro-batches x 4 samples"
    assert_same_bits(looked, plain)


def test_without_a_gain_the_smaller_size_is_suggested(make_trainer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(MicroBatchFinder, "_seconds", timed(MicroBatchFinder._seconds, per_sample=True))
    finder = MicroBatchFinder(then="stop")

    result = make_trainer(callbacks=[finder]).fit(Model(), data(20))

    assert finder.suggestion == 2
    assert result.steps == 0


def test_a_single_sample_is_tried_where_two_are_too_many(make_trainer: Any) -> None:
    finder = MicroBatchFinder(then="stop")

    make_trainer(callbacks=[finder]).fit(Single(), data())

    assert finder.suggestion == 1


class Single(Regression):
    """Takes one sample at once."""

    def forward(self, inputs: Tensor) -> Tensor:
        if len(inputs) > 1:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return super().forward(inputs)


def timed(original: Any, *, per_sample: bool = False) -> Any:
    def seconds(self: MicroBatchFinder, run: Any, size: int) -> float:
        original(self, run, size)
        return 0.01 * size if per_sample else 0.01

    return seconds


def test_a_model_that_takes_no_single_sample_is_told(make_trainer: Any) -> None:
    with pytest.raises(UserError, match="not even a single sample fits"):
        make_trainer(callbacks=[MicroBatchFinder()]).fit(Model(most=0), data())


@pytest.mark.parametrize("finder", FINDERS)
@pytest.mark.parametrize("setting", ["shard_optimizer", "overlap_optimizer"])
def test_an_optimizer_that_is_kept_in_parts_is_refused_with_what_to_set(
    make_trainer: Any, finder: str, setting: str
) -> None:
    class InParts(SingleStrategy):
        pass

    setattr(InParts, setting, True)
    message = rf"finder puts the optimizer back.*strategy\.{setting}=true"
    with pytest.raises(UserError, match=message):
        make_trainer(InParts(device="cpu"), callbacks=[FINDERS[finder]()]).fit(Model(), data())


# ---- Phases


class InPhases(Model):
    """Two phases, of which the first has a schedule and the second takes part in every other step."""

    def first_step(self, batch: Any) -> Any:
        return self.training_step(batch)

    def second_step(self, batch: Any) -> Any:
        return 100.0 + self.training_step(batch)

    def configure_phases(self) -> Any:
        first = adamw(self.network)
        schedule = LambdaLR(first, lambda step: 1 / (1 + step))
        return [Phase("first", (first, schedule)), Phase("second", adamw(self.norm), every=2)]


class Manual(InPhases):
    manual = True

    def manual_step(self, control: Any) -> None:
        for name in ("second", "first", "first"):
            control.backward(name)
            control.step(name)


IN_PHASES: dict[str, Callable[[], list[Callback]]] = {
    "learning rate": lambda: [LearningRateFinder(steps=12, then="continue", phase="second")],
    "micro-batch": lambda: [MicroBatchFinder(then="continue")],
}


@pytest.mark.parametrize("kind", [InPhases, Manual])
@pytest.mark.parametrize("finder", IN_PHASES)
@pytest.mark.parametrize("devices", [1, 2])
def test_a_look_at_phases_leaves_nothing_behind(
    make_trainer: Any, finder: str, kind: type[InPhases], devices: int
) -> None:
    class Looks(Callback):
        def on_fit_start(self, run: Any) -> None:
            assert all(parameter.requires_grad for parameter in run.task.parameters())  # as before any phase

    looked, plain = kind(), kind()
    strategy = partial(DataParallelStrategy, devices=["cpu"] * devices)

    make_trainer(strategy(), callbacks=[*IN_PHASES[finder](), Looks()], max_duration="6step").fit(looked, data())
    make_trainer(strategy(), max_duration="6step").fit(plain, data())

    assert_same_bits(looked, plain)


@pytest.mark.parametrize(("phase", "above"), [("first", 0.0), ("second", 100.0)])
def test_one_phase_is_swept_and_the_other_keeps_its_rate(
    make_trainer: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, phase: str, above: float
) -> None:
    finder = LearningRateFinder(steps=10, lowest=1e-4, highest=1e-1, then="apply", phase=phase)
    recorder, seen = Recorder(), []
    monkeypatch.setattr("trainkit.callbacks.learning_rate_finder.suggest", lambda rates, losses: 0.02)
    step = SingleStrategy.optimizer_step

    def looked_at(self: Any, optimization: Any) -> Any:
        seen.append((optimization.phase, optimization.learning_rates()[0]))
        return step(self, optimization)

    monkeypatch.setattr(SingleStrategy, "optimizer_step", looked_at)
    make_trainer(
        SingleStrategy(device="cpu"), callbacks=[finder, recorder], run_dir=tmp_path, max_duration="1step"
    ).fit(InPhases(), data())

    kept = json.loads((tmp_path / "learning_rates.json").read_text())
    swept = [rate for name, rate in seen if name == phase][: len(kept["rates"])]
    tried, trained = seen[: -len(recorder.run.optimizations)], seen[-len(recorder.run.optimizations) :]
    assert kept["rates"] == pytest.approx([1e-4 * 10 ** (3 * number / 9) for number in range(10)])
    assert kept["rates"] == pytest.approx(swept)
    assert min(kept["losses"]) > above
    assert above or max(kept["losses"]) < 100.0
    assert {rate for name, rate in tried if name != phase} == {0.01}
    assert dict(trained) == pytest.approx({"first": 0.01, "second": 0.01, phase: 0.02})


@pytest.mark.parametrize(
    ("kind", "phase", "message"),
    [
        (InPhases, None, r"has the phases first, second; say which one, as learning_rate_finder\.phase=first"),
        (InPhases, "secnd", r"phase=secnd is no phase of InPhases\..*second.* Choose first, second"),
        (Model, "first", "Model has no phases; leave it out"),
    ],
)
def test_a_phase_to_sweep_must_be_there(make_trainer: Any, kind: type[Model], phase: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        make_trainer(callbacks=[LearningRateFinder(phase=phase)]).fit(kind(), data())


def test_memory_that_ends_in_one_phase_ends_the_trial(make_trainer: Any) -> None:
    class Hungry(InPhases):
        def second_step(self, batch: Any) -> Any:
            assert not next(self.network.parameters()).requires_grad  # as when this phase is trained
            if len(batch[0]) > 4:
                raise torch.OutOfMemoryError("CUDA out of memory.")
            return super().second_step(batch)

    finder = MicroBatchFinder(then="stop")
    make_trainer(callbacks=[finder]).fit(Hungry(), data())
    assert finder.suggestion in (2, 4)


def test_phases_without_methods_of_their_own_are_refused_with_what_to_type(make_trainer: Any) -> None:
    class Nameless(Manual):
        second_step = None  # type: ignore[assignment] # as if manual_step named another method

    with pytest.raises(UserError, match=r"no method second_step; .*strategy\.micro_batch_size=8"):
        make_trainer(callbacks=[MicroBatchFinder()]).fit(Nameless(), data())


def test_a_chart_of_nothing_is_still_a_chart() -> None:
    drawn = chart([1.0, 2.0], [math.nan, math.inf], marked=None, titles=("a < b", "x", "y"))

    assert ElementTree.fromstring(drawn).tag.endswith("svg")
