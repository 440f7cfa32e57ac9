"""What a run has after the loss of a rank beside weights and optimizers: what steps and callbacks change themselves."""

import json
import os
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset
from trainkit.callbacks.checkpoint import Checkpoint
from trainkit.strategies.single import SingleStrategy

from tests.reliability.test_rank_loss import BATCH, INPUTS, Death, Fragile, Meets, ddp, die, left_behind, network
from tests.seams.test_optimizer_modes import Averaging
from trainkit import Callback, Data, Phase, Trainer
from trainkit.checkpoint.store import CheckpointStore
from trainkit.distributed.failure_store import RankTimeout
from trainkit.distributed.launcher import RankFailure

EPOCHS, STEPS = 3, 12


def fit(
    task: Fragile, *callbacks: Callback, strategy: Any = None, data: TensorDataset | None = None, **more: Any
) -> Any:
    data = TensorDataset(INPUTS) if data is None else data
    settings: dict[str, Any] = {"evaluate_every": "1epoch", "max_duration": f"{STEPS}step", **more}
    resume = settings.pop("resume", None)
    trainer = Trainer(
        ddp(devices=2) if strategy is None else strategy,
        callbacks=list(callbacks),
        loggers=[],
        num_sanity_batches=0,
        run_dir=task.folder / "run",
        **settings,
    )
    result = trainer.fit(task, Data(train=data, validation=data, batch_size=BATCH, shuffle=False), resume=resume)
    assert result.steps == STEPS or "max_duration" in more
    assert result.rank_losses == len(task.deaths)
    assert not left_behind()
    return result


def plain_loop(
    model: nn.Module,
    loss_of: Callable[[Tensor], Tensor],
    after: Callable[[int], None] = lambda step: None,
    optimizer: torch.optim.Optimizer | None = None,
) -> None:
    """Train with the optimizer of `Fragile`; `after` is called after each step."""
    optimizer = optimizer or torch.optim.AdamW(model.parameters(), lr=0.01)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 5, gamma=0.9)
    for step, batch in enumerate(INPUTS.split(BATCH) * EPOCHS, start=1):
        optimizer.zero_grad()
        loss_of(batch).backward()
        optimizer.step()
        schedule.step()
        after(step)


def assert_same(model: nn.Module, expected: nn.Module) -> None:
    state = model.state_dict()
    for name, tensor in expected.state_dict().items():
        torch.testing.assert_close(state[name], tensor, rtol=0, atol=1e-12)


def started_from(task: Fragile) -> list[tuple[str, int]]:
    """Return where the run went on after each loss."""
    lines = [json.loads(line) for line in (task.folder / "run/rank_losses.jsonl").read_text().splitlines()]
    return [("memory" if line["from"] == MEMORY else Path(line["from"]).name, line["step"]) for line in lines]


MEMORY = "the memory of a surviving rank"


# ---- What a step changes


class Momentum(Fragile):
    """Has a momentum encoder, whose weights the step writes itself; `data`: past torch's count of writes."""

    def __init__(self, folder: Path, deaths: tuple[Death, ...] = (), *, by_data: bool = False) -> None:
        super().__init__(folder, deaths)
        self.key, self.by_data = halved().requires_grad_(False), by_data

    def training_step(self, batch: Any) -> Any:
        for key, query in zip(self.key.parameters(), self.network.parameters(), strict=True):
            (key.data if self.by_data else key).lerp_(query.detach(), 0.1)
        return super().training_step(batch) + (self.network(batch[0]) - self.key(batch[0])).square().mean()


def halved() -> nn.Sequential:
    model = network()
    for parameter in model.parameters():
        parameter.data.mul_(0.5)
    return model


@pytest.mark.parametrize("by_data", [False, True])
def test_weights_that_a_step_writes_itself_are_taken_back(by_data: bool, tmp_path: Path) -> None:
    task = Momentum(tmp_path, (("forward", 1, 6), ("forward", 0, 7)), by_data=by_data)
    fit(task)
    query, key = network(), halved()

    def loss_of(batch: Tensor) -> Tensor:
        for one, other in zip(key.parameters(), query.parameters(), strict=True):
            one.data.lerp_(other.data, 0.1)
        return query(batch).square().mean() + (query(batch) - key(batch).detach()).square().mean()

    plain_loop(query, loss_of)
    assert_same(task.network, query)
    assert_same(task.key, key)
    assert started_from(task) == [("memory", 5), ("memory", 6)]


class Lazy(Fragile):
    """Sets a buffer in its first step, and counts evaluated batches in another."""

    def __init__(self, folder: Path, deaths: tuple[Death, ...] = ()) -> None:
        super().__init__(folder, deaths)
        self.register_buffer("count", None)
        self.register_buffer("evaluated", torch.zeros((), dtype=torch.int64))

    def training_step(self, batch: Any) -> Any:
        self.count = torch.ones((), dtype=torch.float64) if self.count is None else self.count + 1
        return super().training_step(batch) / self.count

    def validation_step(self, batch: Any) -> Any:
        self.evaluated += 1
        return super().validation_step(batch)


def test_buffers_that_begin_as_none_and_those_that_an_evaluation_changes_are_taken_back(tmp_path: Path) -> None:
    task = Lazy(tmp_path, (("forward", 1, 1), ("forward", 0, 6), ("evaluation", 1, 8)))
    fit(task)
    model, steps = network(), iter(range(1, STEPS + 1))
    plain_loop(model, lambda batch: model(batch).square().mean() / next(steps))
    assert_same(task.network, model)
    assert (int(task.count), int(task.evaluated)) == (STEPS, STEPS)  # an epoch has as many batches of either
    assert started_from(task)[1:] == [("memory", 5), ("memory", 8)]


class Divides(nn.Module):
    """Divides by the number of its calls, which its own code saves."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def forward(self, inputs: Tensor) -> Tensor:
        self.calls += self.training
        return inputs / self.calls

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        destination[f"{prefix}calls"] = torch.tensor(self.calls)

    def _load_from_state_dict(self, state: Any, prefix: str, *_: Any) -> None:
        self.calls = int(state[f"{prefix}calls"])


class SavesItsWay(Fragile):
    def __init__(self, folder: Path, deaths: tuple[Death, ...] = ()) -> None:
        super().__init__(folder, deaths)
        self.divides = Divides()

    def training_step(self, batch: Any) -> Any:
        return super().training_step([self.divides(batch[0])])


def test_a_module_whose_code_saves_it_goes_back_to_the_last_checkpoint(tmp_path: Path) -> None:
    task = SavesItsWay(tmp_path, (("forward", 1, 7),))
    fit(task, Checkpoint(every="5step"))
    model, steps = network(), iter(range(1, STEPS + 1))
    plain_loop(model, lambda batch: model(batch / next(steps)).square().mean())
    assert_same(task.network, model)
    assert [step for _, step in started_from(task)] == [5]


class Accumulates(Fragile):
    """Updates with the gradients of two steps."""

    manual = True

    def configure_phases(self) -> Any:
        return [Phase("model", torch.optim.SGD(self.parameters(), lr=0.1))]

    def manual_step(self, control: Any) -> None:
        control.backward("model")
        if control.num_steps % 2:
            control.step("model")

    def model_step(self, batch: Any) -> Any:
        return self.training_step(batch)


@pytest.mark.parametrize("place", ["forward", "in step complete"])
def test_gradients_that_wait_for_a_later_step_go_back_to_the_last_checkpoint(place: str, tmp_path: Path) -> None:
    task = Accumulates(tmp_path, ((place, 1, 6 if place == "forward" else 5),))
    fit(task, Meets(), Checkpoint(every="4step"))
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step, batch in enumerate(INPUTS.split(BATCH) * EPOCHS, start=1):
        model(batch).square().mean().backward()
        if step % 2 == 0:
            optimizer.step()
            optimizer.zero_grad()
    assert_same(task.network, model)
    assert [step for _, step in started_from(task)] == [4]


class AveragingTask(Fragile):
    def configure_optimizers(self) -> Any:
        optimizer = Averaging(self.parameters(), lr=0.1)
        return optimizer, torch.optim.lr_scheduler.StepLR(optimizer, 5, gamma=0.9)


class SeesWeights(Callback):
    def __init__(self) -> None:
        self.sums: list[float] = []

    def on_evaluation_end(self, run: Any, stage: str, metrics: dict[str, float]) -> None:
        self.sums.append(sum_of(run.task.network))

    def state_dict(self) -> dict[str, Any]:
        return {"sums": self.sums}

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        self.sums = saved["sums"]


def sum_of(model: nn.Module) -> float:
    return float(sum(parameter.detach().sum() for parameter in model.parameters()))


def test_an_optimizer_that_trains_other_weights_than_it_evaluates_has_both_after_a_loss(tmp_path: Path) -> None:
    task = AveragingTask(tmp_path, (("in step end", 1, 3), ("evaluation", 0, 4), ("in evaluation end", 1, 8)))
    sees = SeesWeights()
    fit(task, Meets(), sees)
    model, sums = network(), []
    optimizer = Averaging(model.parameters(), lr=0.1)
    optimizer.train()

    def after(step: int) -> None:
        if step % 4 == 0:
            optimizer.eval()
            sums.append(sum_of(model))
            optimizer.train()

    plain_loop(model, lambda batch: model(batch).square().mean(), after, optimizer)
    optimizer.eval()
    assert_same(task.network, model)
    assert sees.sums == pytest.approx(sums, abs=1e-12)
    assert [source for source, _ in started_from(task)] == ["memory"] * 3


# ---- What callbacks change


class ChangesFlags(Callback):
    """Unfreezes a layer after step 3, and puts a part into evaluation mode after the first epoch."""

    def on_step_end(self, run: Any) -> None:
        if run.state.step == 3:
            run.task.network[0].requires_grad_(True)

    def on_epoch_end(self, run: Any) -> None:
        if run.state.step == 4:
            run.task.gate.eval()


class Gated(Fragile):
    def __init__(self, folder: Path, deaths: tuple[Death, ...] = ()) -> None:
        super().__init__(folder, deaths)
        self.network[0].requires_grad_(False)
        self.gate = nn.Identity()

    def training_step(self, batch: Any) -> Any:
        return super().training_step(batch) * (1.0 if self.gate.training else 2.0)


def test_what_callbacks_unfreeze_or_put_into_evaluation_mode_stays_so(tmp_path: Path) -> None:
    task = Gated(tmp_path, (("forward", 1, 6), ("evaluation", 0, 8)))
    fit(task, ChangesFlags())
    model, steps = network(), iter(range(1, STEPS + 1))
    model[0].requires_grad_(False)

    def after(step: int) -> None:
        model[0].requires_grad_(step >= 3)

    plain_loop(model, lambda batch: model(batch).square().mean() * (1.0 if next(steps) <= 4 else 2.0), after)
    assert_same(task.network, model)
    assert started_from(task) == [("memory", 5), ("memory", 8)]


class FreezesLater(Callback):
    def on_step_end(self, run: Any) -> None:
        if run.state.step == 3:
            run.task.network[2].requires_grad_(False)


def test_what_a_checkpoint_leaves_out_as_frozen_is_handed_over(tmp_path: Path) -> None:
    task = Gated(tmp_path, (("forward", 1, 6),))
    task.network[0].requires_grad_(True)
    fit(task, FreezesLater(), Checkpoint(every=None, save_at_end=False, trainable_only=True))
    model = network()
    plain_loop(model, lambda batch: model(batch).square().mean(), lambda step: model[2].requires_grad_(step < 3))
    assert_same(task.network, model)
    assert started_from(task) == [("memory", 5)]


class KeepsAttributes(Fragile):
    get_extra_state, set_extra_state = nn.Module.get_extra_state, nn.Module.set_extra_state

    def __init__(self, folder: Path, deaths: tuple[Death, ...] = ()) -> None:
        super().__init__(folder, deaths)
        self.beta, self.constant = 0.0, 1.0
        self.hidden = torch.zeros(4, dtype=torch.float64)
        self.generator = torch.Generator()
        self.register_buffer("mean", torch.zeros(4, dtype=torch.float64), persistent=False)

    def training_step(self, batch: Any) -> Any:
        noise = torch.rand((), generator=self.generator, dtype=torch.float64)
        self.hidden = self.hidden + self.network[0].weight.detach().mean(0)
        self.mean = self.mean + self.hidden
        return super().training_step([batch[0] + self.hidden + self.mean]) * (self.constant + self.beta + noise)


class Anneals(Callback):
    def on_step_end(self, run: Any) -> None:
        run.task.beta = run.state.step / STEPS


def test_a_warning_names_what_no_checkpoint_has(tmp_path: Path) -> None:
    task = KeepsAttributes(tmp_path, (("forward", 1, 6),))
    fit(task, Anneals())
    texts = [json.loads(line)["text"] for line in (tmp_path / "run/warnings.jsonl").read_text().splitlines()]
    (text,) = [text for text in texts if "changed during the run" in text]
    assert text.startswith("beta, extra, generator, hidden, mean of KeepsAttributes")


class Swaps(Callback):
    """Evaluates with halved weights."""

    def on_evaluation_start(self, run: Any, stage: str) -> None:
        self.kept = [parameter.detach().clone() for parameter in run.task.parameters()]
        with torch.no_grad():
            for parameter in run.task.parameters():
                parameter.mul_(0.5)

    def on_evaluation_end(self, run: Any, stage: str, metrics: dict[str, float]) -> None:
        with torch.no_grad():
            for parameter, kept in zip(run.task.parameters(), self.kept, strict=True):
                parameter.copy_(kept)


@pytest.mark.parametrize("is_first", [True, False])
def test_weights_that_a_callback_swaps_for_an_evaluation_are_not_handed_over(is_first: bool, tmp_path: Path) -> None:
    task = Fragile(tmp_path, (("evaluation", 1, 4), ("in evaluation end", 0, 8)))
    fit(task, *([Swaps(), Meets()] if is_first else [Meets(), Swaps()]))
    model = network()
    plain_loop(model, lambda batch: model(batch).square().mean())
    assert_same(task.network, model)
