"""The learning-rate finder: what it suggests, and that it leaves nothing behind."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR, OneCycleLR
from trainkit.callbacks.learning_rate_finder import LearningRateFinder, suggest
from trainkit.strategies.ddp.strategy import DDPStrategy
from trainkit.strategies.dp.strategy import DataParallelStrategy
from trainkit.strategies.fusion.strategy import FusionStrategy
from trainkit.strategies.pipeline.strategy import PipelineStrategy
from trainkit.strategies.single import SingleStrategy
from trainkit.strategies.torch_ddp import TorchDDPStrategy

from tests.tasks import EachStep, Recorder, Regression, adamw, assert_same_bits, regression_data, weights
from trainkit import Callback, Data, Phase, Strategy, Trainer, UserError
from trainkit.testing import run_ranks


class Model(Regression):
    """With dropout, batch norm and an optimizer that keeps a state; memory ends at `most` samples."""

    def __init__(self, optimizer: Any = adamw, most: int = 10**6) -> None:
        super().__init__(optimizer, hidden=9, dropout=0.3)
        self.norm = nn.BatchNorm1d(4)
        self.most = most

    def forward(self, inputs: Tensor) -> Tensor:
        if len(inputs) > self.most:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return super().forward(self.norm(inputs))


def data(batch_size: int = 8) -> Data:
    return Data(train=regression_data(40), batch_size=batch_size)


@pytest.mark.parametrize("settings", [{}, {"precision": "fp16-mixed"}, {"on_nonfinite": "skip"}], ids=str)
def test_training_after_the_search_is_bit_equal(make_trainer: Any, settings: dict[str, Any]) -> None:
    searched, plain = Model(), Model()
    finder = LearningRateFinder(num_steps=12, on_finish="continue")

    make_trainer(callbacks=[finder], max_duration="2epoch", **settings).fit(searched, data())
    make_trainer(max_duration="2epoch", **settings).fit(plain, data())

    assert_same_bits(searched, plain)


def test_gradient_norms_of_the_search_do_not_count_for_spikes(make_trainer: Any) -> None:
    class Averages(Callback):
        def on_fit_start(self, run: Any) -> None:
            self.seen = run.phase_optimizer.spikes.state_dict()

    averages = Averages()
    finder = LearningRateFinder(num_steps=12, on_finish="continue")
    make_trainer(callbacks=[finder, averages], skip_grad_norm_factor=10.0).fit(Model(), data())
    assert averages.seen == {}


def test_the_search_restores_everything_on_several_devices_of_one_process(make_trainer: Any, tmp_path: Path) -> None:
    searched, plain = Model(), Model()
    finder = LearningRateFinder(num_steps=10, on_finish="continue")

    trainer = make_trainer(DataParallelStrategy(devices=["cpu", "cpu"]), callbacks=[finder], max_duration="3step")
    trainer.fit(searched, data())
    make_trainer(DataParallelStrategy(devices=["cpu", "cpu"]), max_duration="3step").fit(plain, data())

    assert_same_bits(searched, plain)


STRATEGIES: dict[str, Callable[[], Strategy]] = {
    "ddp": lambda: DDPStrategy(device="cpu"),
    "torch_ddp": lambda: TorchDDPStrategy(device="cpu"),
    "power_sgd": lambda: DDPStrategy(
        device="cpu", comm_hook="power_sgd", comm_hook_options={"rank": 1, "start_step": 2}
    ),
    "fusion": lambda: FusionStrategy(device="cpu"),
    "pipeline": lambda: PipelineStrategy(stages=2, device="cpu", accumulate=2),
}


def search_on_two_ranks(folder: Path) -> dict[str, Any]:
    """Return for each strategy the weights with and without the search."""
    found: dict[str, Any] = {}
    settings: dict[str, Any] = {"max_duration": "3step", "loggers": [], "num_sanity_batches": 0, "report": False}
    for name, strategy in STRATEGIES.items():
        searched, plain = Model(), Model()
        finder = LearningRateFinder(num_steps=10, on_finish="continue")
        Trainer(strategy(), callbacks=[finder], run_dir=folder / name, **settings).fit(searched, data())
        Trainer(strategy(), callbacks=[], run_dir=folder / f"{name}_plain", **settings).fit(plain, data())
        found[name] = weights(searched), weights(plain)
    searched, plain = InPhases(), InPhases()
    finder = LearningRateFinder(num_steps=10, on_finish="continue", phase="second")
    Trainer(DDPStrategy(device="cpu"), callbacks=[finder], run_dir=folder / "phases", **settings).fit(searched, data())
    Trainer(DDPStrategy(device="cpu"), run_dir=folder / "phases_plain", **settings).fit(plain, data())
    found["phases"] = weights(searched), weights(plain)
    return found


@pytest.mark.slow
def test_the_search_restores_everything_on_several_ranks(tmp_path: Path) -> None:
    first, second = run_ranks(search_on_two_ranks, 2, tmp_path)

    for name in (*STRATEGIES, "phases"):
        for searched, plain in (first[name], second[name]):
            assert_same_bits(searched, plain)
        assert len(json.loads((tmp_path / name / "learning_rates.json").read_text())["losses"]) == 10


# ---- Learning rates


def test_the_suggestion_is_where_the_loss_falls_most_steeply() -> None:
    """A loss that falls like a logistic curve around 1e-3 and explodes from 1e-1 on."""
    rates = [10 ** (-6 + 6 * number / 99) for number in range(100)]
    losses = [1 / (1 + (rate / 1e-3) ** 2) + (rate / 0.3) ** 4 for rate in rates]

    found = suggest(rates, losses)

    assert found is not None
    assert 3e-4 < found < 5e-3


@pytest.mark.parametrize("losses", [[1.0] * 50, [1.0 + n for n in range(50)], [math.nan] * 50, [1.0]])
def test_a_loss_that_does_not_fall_gives_none(losses: list[float]) -> None:
    assert suggest([10.0 ** (n / 10) for n in range(len(losses))], losses) is None


def test_the_search_ends_the_run_and_writes_a_plot_and_the_numbers(make_trainer: Any, tmp_path: Path) -> None:
    finder = LearningRateFinder(min_lr=1e-5, max_lr=10.0, num_steps=60)

    result = make_trainer(callbacks=[finder], run_dir=tmp_path).fit(Model(), data())

    kept = json.loads((tmp_path / "learning_rates.json").read_text())
    assert result.steps == 0
    assert result.exit_reason.startswith("learning_rate_finder has finished")
    assert kept["suggestion"] == finder.suggestion
    assert finder.suggestion is not None
    assert 1e-4 < finder.suggestion < 1.0
    assert kept["rates"][0] == 1e-5
    page = (tmp_path / "learning_rates.html").read_text()
    assert f"loss at {finder.suggestion:.2g} <b>" in page
    assert "log10(learning rate)" in page and f"{finder.suggestion:.2g} is where the loss fell most steeply" in page


def test_the_plot_of_a_narrow_range_has_an_axis(make_trainer: Any, tmp_path: Path) -> None:
    make_trainer(callbacks=[LearningRateFinder(min_lr=2e-3, max_lr=8e-3, num_steps=10)], run_dir=tmp_path).fit(
        Regression(), data()
    )

    assert re.search(r">-2\.\d+ log10\(learning rate\)</text>", (tmp_path / "learning_rates.html").read_text())


def test_the_trial_ends_when_the_loss_explodes(make_trainer: Any, tmp_path: Path) -> None:
    task = Regression(lambda task: torch.optim.SGD(task.parameters(), lr=0.01))
    make_trainer(callbacks=[LearningRateFinder(min_lr=1e-3, max_lr=10.0, num_steps=60)], run_dir=tmp_path).fit(
        task, data()
    )

    losses = json.loads((tmp_path / "learning_rates.json").read_text())["losses"]
    assert 10 < len(losses) < 60
    assert None not in losses and losses[-1] > 4 * min(losses)  # not only when nothing is finite any more


@pytest.mark.parametrize("schedule", ["lambda", "one cycle"])
def test_an_applied_suggestion_trains_like_the_same_setting(make_trainer: Any, schedule: str) -> None:
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
        seen = EachStep(lambda run: [group["lr"] for group in run.phase_optimizers[0].optimizer.param_groups])
        make_trainer(callbacks=[*callbacks, seen], max_duration="2epoch").fit(task, data())
        return seen.seen

    finder = LearningRateFinder(min_lr=1e-5, max_lr=10.0, num_steps=60, on_finish="apply")
    applied = rates(Model(build(0.01)), finder)
    assert finder.suggestion is not None
    expected = rates(Model(build(finder.suggestion)))

    for one, other in zip(applied, expected, strict=True):
        assert one == pytest.approx(other, rel=1e-9)


def test_a_resumed_run_does_not_search_again(make_trainer: Any, tmp_path: Path) -> None:
    make_trainer(callbacks=["checkpoint"], run_dir=tmp_path, max_duration="2step").fit(Model(), data())
    finder = LearningRateFinder()

    make_trainer(callbacks=[finder], run_dir=tmp_path, max_duration="4step").fit(Model(), data(), resume=tmp_path)

    assert finder.suggestion is None


@pytest.mark.parametrize("setting", ["shard_optimizer", "optimizer_in_backward"])
def test_a_sharded_optimizer_is_rejected_with_the_setting_to_change(make_trainer: Any, setting: str) -> None:
    class InParts(SingleStrategy):
        pass

    setattr(InParts, setting, True)
    message = rf"finder restores the optimizer.*strategy\.{setting}=true"
    with pytest.raises(UserError, match=message):
        make_trainer(InParts(device="cpu"), callbacks=[LearningRateFinder()]).fit(Model(), data())


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


@pytest.mark.parametrize("kind", [InPhases, Manual])
@pytest.mark.parametrize("devices", [1, 2])
def test_the_search_restores_everything_with_phases(make_trainer: Any, kind: type[InPhases], devices: int) -> None:
    class Observer(Callback):
        def on_fit_start(self, run: Any) -> None:
            assert all(parameter.requires_grad for parameter in run.task.parameters())  # as before any phase

    searched, plain = kind(), kind()
    strategy = partial(DataParallelStrategy, devices=["cpu"] * devices)
    finder = LearningRateFinder(num_steps=12, on_finish="continue", phase="second")

    make_trainer(strategy(), callbacks=[finder, Observer()], max_duration="6step").fit(searched, data())
    make_trainer(strategy(), max_duration="6step").fit(plain, data())

    assert_same_bits(searched, plain)


@pytest.mark.parametrize(("phase", "above"), [("first", 0.0), ("second", 100.0)])
def test_the_rate_of_one_phase_is_varied_and_the_other_keeps_its_rate(
    make_trainer: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, phase: str, above: float
) -> None:
    finder = LearningRateFinder(num_steps=10, min_lr=1e-4, max_lr=1e-1, on_finish="apply", phase=phase)
    recorder, seen = Recorder(), []
    monkeypatch.setattr("trainkit.callbacks.learning_rate_finder.suggest", lambda rates, losses: 0.02)
    step = SingleStrategy.optimizer_step

    def searched_at(self: Any, phase_optimizer: Any) -> Any:
        seen.append((phase_optimizer.phase, phase_optimizer.optimizer.param_groups[0]["lr"]))
        return step(self, phase_optimizer)

    monkeypatch.setattr(SingleStrategy, "optimizer_step", searched_at)
    make_trainer(
        SingleStrategy(device="cpu"), callbacks=[finder, recorder], run_dir=tmp_path, max_duration="1step"
    ).fit(InPhases(), data())

    kept = json.loads((tmp_path / "learning_rates.json").read_text())
    swept = [rate for name, rate in seen if name == phase][: len(kept["rates"])]
    tried, trained = seen[: -len(recorder.run.phase_optimizers)], seen[-len(recorder.run.phase_optimizers) :]
    assert kept["rates"] == pytest.approx([1e-4 * 10 ** (3 * number / 9) for number in range(10)])
    assert kept["rates"] == pytest.approx(swept)
    assert min(kept["losses"]) > above
    assert above or max(kept["losses"]) < 100.0
    assert {rate for name, rate in tried if name != phase} == {0.01}
    assert dict(trained) == pytest.approx({"first": 0.01, "second": 0.01, phase: 0.02})


@pytest.mark.parametrize(
    ("kind", "phase", "message"),
    [
        (InPhases, None, r"has the phases first, second; choose one, for example learning_rate_finder\.phase=first"),
        (InPhases, "secnd", r"phase=secnd is not a phase of InPhases\..*second.* Choose first, second"),
        (Model, "first", "Model has no phases; remove the key"),
    ],
)
def test_an_unknown_phase_is_rejected(make_trainer: Any, kind: type[Model], phase: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        make_trainer(callbacks=[LearningRateFinder(phase=phase)]).fit(kind(), data())
