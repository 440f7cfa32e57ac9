"""What a run has after the loss of a rank beside weights and optimizers: what steps and callbacks change themselves."""

import json
import os
import signal
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

from tests.reliability.test_rank_loss import BATCH, INPUTS, Death, Fragile, ddp, die, left_behind, network
from tests.seams.test_optimizer_modes import Averaging
from trainkit import Callback, Data, Phase, Trainer
from trainkit.checkpoint.store import CheckpointStore
from trainkit.distributed.failure_store import RankTimeout
from trainkit.distributed.launcher import RankFailure

EPOCH, STEPS = 4, 12
HOOKS = ("on_epoch_start", "on_step_end", "on_evaluation_end", "on_epoch_end", "on_step_complete", "on_fit_end")


def fit(
    task: Fragile, *callbacks: Callback, strategy: Any = None, data: Any = None, resume: Path | None = None, **more: Any
) -> None:
    data = data or TensorDataset(INPUTS)
    settings = {"evaluate_every": "1epoch", "max_duration": f"{STEPS}step", "num_sanity_batches": 0, **more}
    run = task.folder / "run"
    trainer = Trainer(strategy or ddp(devices=2), callbacks=list(callbacks), loggers=[], run_dir=run, **settings)
    result = trainer.fit(task, Data(train=data, validation=data, batch_size=BATCH, shuffle=False), resume=resume)
    assert result.rank_losses == len(task.deaths)
    assert json.loads((run / "summary.json").read_text())["status"] == "finished"
    assert not [*run.glob("failure*"), *left_behind()]


def losses_of(task: Fragile) -> list[tuple[str, int]]:
    """Return for each loss from what the run went on, and the step."""
    lines = [json.loads(line) for line in (task.folder / "run/rank_losses.jsonl").read_text().splitlines()]
    return [("memory" if "memory" in line["from"] else "checkpoint", line["step"]) for line in lines]


def plain_loop(
    loss_of: Callable[[Tensor, int], Tensor],
    model: nn.Module,
    after: Callable[[int], Any] = lambda step: None,
    optimizer: torch.optim.Optimizer | None = None,
) -> nn.Module:
    """Train as `Fragile` is trained, and return the model; a step whose loss is not finite changes nothing."""
    optimizer = optimizer or torch.optim.AdamW(model.parameters(), lr=0.01)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 5, gamma=0.9)
    for step, batch in enumerate(INPUTS.split(BATCH) * (STEPS // EPOCH), start=1):
        optimizer.zero_grad()
        loss = loss_of(batch, step)
        if loss.isfinite():
            loss.backward()
            optimizer.step()
        schedule.step()
        after(step)
    return model


def squares(outputs: Tensor) -> Tensor:
    return outputs.square().mean()


def assert_same(model: nn.Module, expected: nn.Module) -> None:
    state = model.state_dict()
    for name, tensor in expected.state_dict().items():
        torch.testing.assert_close(state[name], tensor, rtol=0, atol=1e-12)


class EachHook(Callback):
    def called(self, run: Any, hook: str) -> None: ...


for each in HOOKS:
    setattr(EachHook, each, lambda self, run, *_, hook=each: self.called(run, hook))


class Dies(EachHook):
    """Has a collective in each hook, in which the survivors find that a rank is gone."""

    def __init__(self, place: str = "in") -> None:
        self.place = place

    def called(self, run: Any, hook: str) -> None:
        die(run.task, f"{self.place} {hook}", run.state.step, late=True)
        run.strategy.comm.barrier()


class Keeps(Callback):
    """Keeps the steps and the sums of evaluated weights that it has seen, on the main rank only."""

    def __init__(self) -> None:
        self.steps: list[int] = []
        self.sums: list[float] = []

    def on_evaluation_end(self, run: Any, stage: str, metrics: dict[str, float]) -> None:
        self.sums += [sum_of(run.task.network)] * run.is_main

    def on_step_complete(self, run: Any) -> None:
        self.steps += [run.state.step] * run.is_main

    def state_dict(self) -> dict[str, Any]:
        return dict(vars(self))

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        vars(self).update(saved)


def sum_of(model: nn.Module) -> float:
    return sum(float(parameter.sum()) for parameter in model.parameters())


# ---- What a step changes


class Momentum(Fragile):
    """Has a momentum encoder, whose weights the step writes itself; `by_data`: past torch's count of writes."""

    def __init__(self, folder: Path, deaths: tuple[Death, ...], *, by_data: bool) -> None:
        super().__init__(folder, deaths)
        self.key, self.by_data = zeros().requires_grad_(False), by_data

    def training_step(self, batch: Any) -> Any:
        follow(self.key, self.network, by_data=self.by_data)
        return super().training_step(batch) + squares(self.network(batch[0]) - self.key(batch[0]))


def follow(key: nn.Module, query: nn.Module, *, by_data: bool) -> None:
    for own, other in zip(key.parameters(), query.parameters(), strict=True):
        (own.data if by_data else own).lerp_(other.detach(), 0.1)


def zeros() -> nn.Sequential:
    model = network()
    torch.nn.utils.vector_to_parameters(torch.zeros(49, dtype=torch.float64), model.parameters())
    return model


@pytest.mark.parametrize("by_data", [False, True])
def test_weights_that_a_step_writes_itself_are_taken_back(by_data: bool, tmp_path: Path) -> None:
    task = Momentum(
        tmp_path, (("forward", 1, 1), ("in on_step_end", 1, 5), ("forward", 0, 6), ("forward", 1, 8)), by_data=by_data
    )
    fit(task, Dies())
    query, key = network(), zeros().requires_grad_(False)

    def loss_of(batch: Tensor, step: int) -> Tensor:
        follow(key, query, by_data=False)
        return squares(query(batch)) + squares(query(batch) - key(batch))

    assert_same(task.network, plain_loop(loss_of, query))
    assert_same(task.key, key)
    assert losses_of(task)[1:] == [("memory", 5), ("memory", 5), ("memory", 7)]


class Lazy(Fragile):
    """Sets a buffer in its first step, and counts evaluated batches in another."""

    def __init__(self, folder: Path, deaths: tuple[Death, ...]) -> None:
        super().__init__(folder, deaths)
        self.register_buffer("count", None)
        self.register_buffer("evaluated", torch.zeros((), dtype=torch.int64))

    def training_step(self, batch: Any) -> Any:
        self.count = torch.ones((), dtype=torch.float64) if self.count is None else self.count + 1
        return super().training_step(batch) / self.count

    def validation_step(self, batch: Any) -> Any:
        self.evaluated += 1
        return super().validation_step(batch)


def test_buffers_that_are_none_at_first_and_those_that_an_evaluation_changes_are_taken_back(tmp_path: Path) -> None:
    task = Lazy(tmp_path, (("forward", 1, 1), ("forward", 0, 6), ("evaluation", 1, 8)))
    fit(task)
    model = network()
    assert_same(task.network, plain_loop(lambda batch, step: squares(model(batch)) / step, model))
    assert (int(task.count), int(task.evaluated)) == (STEPS, STEPS)  # an epoch has as many batches of either
    assert losses_of(task)[1:] == [("memory", 5), ("memory", 8)]


class Divides(nn.Module):
    """Divides by the number of its calls, which code of its own saves."""

    calls = 0

    def forward(self, inputs: Tensor) -> Tensor:
        self.calls += self.training
        return inputs / self.calls

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        destination[f"{prefix}calls"] = torch.tensor(self.calls)

    def _load_from_state_dict(self, state: Any, prefix: str, *_: Any) -> None:
        self.calls = int(state[f"{prefix}calls"])


class SavesItsWay(Fragile):
    def __init__(self, folder: Path, deaths: tuple[Death, ...]) -> None:
        super().__init__(folder, deaths)
        self.divides = Divides()

    def training_step(self, batch: Any) -> Any:
        return super().training_step([self.divides(batch[0])])


def test_a_module_whose_own_code_saves_it_goes_back_to_the_last_checkpoint(tmp_path: Path) -> None:
    task = SavesItsWay(tmp_path, (("forward", 1, 7),))
    fit(task, Checkpoint(every="5step"))
    model = network()
    assert_same(task.network, plain_loop(lambda batch, step: squares(model(batch / step)), model))
    assert losses_of(task) == [("checkpoint", 5)]


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


@pytest.mark.parametrize("death", [("forward", 1, 6), ("in on_step_complete", 1, 5)])
def test_gradients_that_wait_for_a_later_step_go_back_to_the_last_checkpoint(death: Death, tmp_path: Path) -> None:
    task = Accumulates(tmp_path, (death,))
    fit(task, Dies(), Checkpoint(every="4step"))
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step, batch in enumerate(INPUTS.split(BATCH) * (STEPS // EPOCH), start=1):
        squares(model(batch)).backward()
        if step % 2 == 0:
            optimizer.step()
            optimizer.zero_grad()
    assert_same(task.network, model)
    assert losses_of(task) == [("checkpoint", 4)]


class Averages(Fragile):
    def configure_optimizers(self) -> Any:
        optimizer = Averaging(self.parameters(), lr=0.1)
        return optimizer, torch.optim.lr_scheduler.StepLR(optimizer, 5, gamma=0.9)


def test_an_optimizer_has_the_weights_to_train_and_those_to_evaluate_with_after_a_loss(tmp_path: Path) -> None:
    task = Averages(tmp_path, (("in on_step_end", 1, 3), ("evaluation", 0, 4), ("in on_evaluation_end", 1, 8)))
    keeps = Keeps()
    fit(task, Dies(), keeps)
    model, sums = network(), []
    optimizer = Averaging(model.parameters(), lr=0.1)

    def after(step: int) -> None:
        if step % EPOCH == 0:
            optimizer.eval()
            sums.append(sum_of(model))
            optimizer.train()

    optimizer.train()
    plain_loop(lambda batch, step: squares(model(batch)), model, after, optimizer)
    optimizer.eval()
    assert_same(task.network, model)
    assert keeps.sums == pytest.approx(sums, abs=1e-12)
    assert losses_of(task) == [("memory", 3), ("memory", 4), ("memory", 8)]


# ---- What callbacks change


class Exchanges(Callback):
    """Freezes another layer after step 3 and in evaluations, and puts a part into evaluation mode after an epoch."""

    def on_step_end(self, run: Any) -> None:
        exchange(run.task.network, run.state.step)

    def on_epoch_end(self, run: Any) -> None:
        run.task.gate.eval()

    def on_evaluation_start(self, run: Any, stage: str) -> None:
        self.was_trained = run.task.network[0].weight.requires_grad
        run.task.network[0].requires_grad_(False)

    def on_evaluation_end(self, run: Any, stage: str, metrics: dict[str, float]) -> None:
        run.task.network[0].requires_grad_(self.was_trained)


def exchange(layers: nn.Sequential, step: int) -> None:
    if step == 3:
        layers[0].requires_grad_(True)
        layers[2].requires_grad_(False)


class Gated(Fragile):
    def __init__(self, folder: Path, deaths: tuple[Death, ...]) -> None:
        super().__init__(folder, deaths)
        self.network[0].requires_grad_(False)
        self.gate = nn.Identity()

    def training_step(self, batch: Any) -> Any:
        return super().training_step(batch if self.gate.training else [batch[0] + 1.0])


def test_what_callbacks_freeze_unfreeze_or_put_into_evaluation_mode_stays_so(tmp_path: Path) -> None:
    task = Gated(tmp_path, (("forward", 1, 6), ("evaluation", 0, 8)))
    fit(task, Exchanges(), Checkpoint(every=None, save_at_end=False, trainable_only=True))
    model = network()
    model[0].requires_grad_(False)
    plain_loop(lambda batch, step: squares(model(batch + (step > EPOCH))), model, lambda step: exchange(model, step))
    assert_same(task.network, model)
    assert losses_of(task) == [("memory", 5), ("memory", 8)]


class Attributes(Fragile):
    """Changes what no checkpoint has."""

    get_extra_state, set_extra_state = nn.Module.get_extra_state, nn.Module.set_extra_state

    def __init__(self, folder: Path, deaths: tuple[Death, ...]) -> None:
        super().__init__(folder, deaths)
        self.beta, self.constant = 0.0, 1.0
        self.hidden, self.generator = torch.zeros(4, dtype=torch.float64), torch.Generator()
        self.register_buffer("mean", torch.zeros(4, dtype=torch.float64), persistent=False)

    def training_step(self, batch: Any) -> Any:
        self.hidden = self.hidden + self.network[0].weight.detach().mean(0)
        self.mean = self.mean + self.hidden
        noise = torch.rand((), generator=self.generator, dtype=torch.float64)
        return super().training_step([batch[0] + self.mean]) * (self.constant + self.beta + noise)


class Anneals(Callback):
    def on_step_end(self, run: Any) -> None:
        run.task.beta = run.state.step / STEPS


def test_a_warning_names_what_no_checkpoint_has(tmp_path: Path) -> None:
    fit(Attributes(tmp_path, (("forward", 1, 6),)), Anneals(), Checkpoint(every="4step"))
    texts = [json.loads(line)["text"] for line in (tmp_path / "run/warnings.jsonl").read_text().splitlines()]
    (text,) = [text for text in texts if "changed during the run" in text]
    assert text.startswith("beta, extra, generator, hidden, mean of Attributes")


class Swaps(Callback):
    """Evaluates with other weights; `by_data`: written past torch's count of writes."""

    def __init__(self, *, by_data: bool) -> None:
        self.by_data = by_data

    def on_evaluation_start(self, run: Any, stage: str) -> None:
        self.kept = [parameter.detach().clone() for parameter in run.task.parameters()]
        self._write(run, [kept / 2 for kept in self.kept])

    def on_evaluation_end(self, run: Any, stage: str, metrics: dict[str, float]) -> None:
        self._write(run, self.kept)

    def _write(self, run: Any, values: list[Tensor]) -> None:
        with torch.no_grad():
            for parameter, value in zip(run.task.parameters(), values, strict=True):
                (parameter.data if self.by_data else parameter).copy_(value)


@pytest.mark.parametrize("by_data", [False, True])
@pytest.mark.parametrize("is_first", [False, True])
def test_weights_that_a_callback_swaps_for_an_evaluation_are_not_handed_over(
    by_data: bool, is_first: bool, tmp_path: Path
) -> None:
    task = Fragile(tmp_path, (("evaluation", 1, 4), ("in on_evaluation_end", 0, 8)))
    callbacks = [Swaps(by_data=by_data), Dies()]
    fit(task, *(callbacks if is_first else callbacks[::-1]))
    model = network()
    assert_same(task.network, plain_loop(lambda batch, step: squares(model(batch)), model))


# ---- Hooks and checkpoints


class Notes(EachHook):
    """Notes each call in a file, which outlives the rank."""

    def __init__(self, name: str) -> None:
        self.name = name

    def called(self, run: Any, hook: str) -> None:
        with open(run.task.folder / f"calls_{os.environ['RANK']}", "a") as file:
            file.write(f"{self.name} {hook} {run.state.step}\n")


class DiesLate(Fragile):
    """Dies once the other ranks have called the hooks that it has called."""

    def training_step(self, batch: Any) -> Any:
        die(self, "step", int(self.steps_seen) + 1, late=True)
        return super().training_step(batch)

    def validation_step(self, batch: Any) -> Any:
        die(self, "validation", int(self.steps_seen), late=True)
        return super().validation_step(batch)


FIRST_STEPS = (("step", 0, 1), ("in on_epoch_start", 1, 4), ("then in on_epoch_start", 0, 4), ("step", 0, 5))
EPOCH_END = (("in on_step_end", 1, 8), ("validation", 0, 8), ("in on_evaluation_end", 0, 8), ("in on_epoch_end", 1, 8))
COMPLETE = (("in on_step_complete", 1, 8), ("then in on_step_complete", 0, 8), ("step", 1, 9))
END = (("step", 1, 11), ("validation", 0, STEPS), ("in on_fit_end", 1, STEPS), ("then in on_fit_end", 0, STEPS))


@pytest.mark.parametrize("deaths", [FIRST_STEPS + END, EPOCH_END + COMPLETE], ids=["ends", "middle"])
def test_each_hook_is_called_once_also_after_a_second_loss_before_the_next_step(
    deaths: tuple[Death, ...], tmp_path: Path
) -> None:
    task = DiesLate(tmp_path, deaths)
    callbacks = [Notes("first"), Dies(), Notes("second"), Dies("then in"), Notes("third")]
    fit(task, *callbacks, strategy=ddp(devices=2, max_rank_losses=9))
    steps: dict[str, Any] = dict.fromkeys(HOOKS, range(EPOCH, STEPS + 1, EPOCH))
    steps |= dict.fromkeys(("on_step_end", "on_step_complete"), range(1, STEPS + 1))
    steps |= {"on_epoch_start": range(0, STEPS, EPOCH), "on_fit_end": [STEPS]}
    names = ("first", "second", "third")
    expected = Counter(f"{name} {hook} {step}" for name in names for hook in HOOKS for step in steps[hook])
    for rank in (0, 1):
        assert Counter((tmp_path / f"calls_{rank}").read_text().splitlines()) == expected
    assert losses_of(task) == [("memory", step - (place == "step")) for place, _, step in deaths]


class CountsEvaluations(Fragile):
    """Has no buffers, and counts in its extra state."""

    def __init__(self, folder: Path, deaths: tuple[Death, ...]) -> None:
        super().__init__(folder, deaths)
        del self.steps_seen, self.growing

    def training_step(self, batch: Any) -> Any:
        return squares(self.network(batch[0]))

    def validation_step(self, batch: Any) -> Any:
        self.extra += 1
        die(self, "validation", 0, late=True)
        return {"loss": squares(self.network(batch[0]))}


def test_the_extra_state_is_taken_back_in_an_evaluation_before_the_first_step(tmp_path: Path) -> None:
    task = CountsEvaluations(tmp_path, (("in on_step_end", 1, 4), ("validation", 0, 0)))
    fit(task, Kills(), Dies())
    assert task.extra == STEPS


class Kills(Callback):
    """Lets the task die in the evaluation after a first loss only."""

    def on_fit_start(self, run: Any) -> None:
        if run.strategy.attempt == 0:
            run.task.deaths = run.task.deaths[:1]


class SlowMain(Fragile):
    def training_step(self, batch: Any) -> Any:
        time.sleep(0.3 * (os.environ["RANK"] == "0" and int(self.steps_seen) == 5))
        return super().training_step(batch)


def test_callbacks_have_the_state_of_the_main_rank_although_another_hands_over_first(tmp_path: Path) -> None:
    keeps = Keeps()
    fit(SlowMain(tmp_path, (("forward", 1, 6),)), keeps, strategy=ddp(devices=3))
    assert keeps.steps == list(range(1, STEPS + 1))


def test_a_main_rank_that_dies_at_the_end_does_not_repeat_the_run(tmp_path: Path) -> None:
    class DiesAtEnd(Callback):
        def on_fit_end(self, run: Any) -> None:
            die(run.task, "at the end", run.state.step, late=True)

    task = Fragile(tmp_path, (("at the end", 0, STEPS),))
    fit(task, Notes("each"), DiesAtEnd())
    assert losses_of(task) == [("memory", STEPS)]
    for rank in (0, 1):
        assert (tmp_path / f"calls_{rank}").read_text().splitlines().count(f"each on_fit_end {STEPS}") == 1


class BestAtEight(Fragile):
    def validation_step(self, batch: Any) -> Any:
        return {"loss": (self.steps_seen - 8).abs().double()}


@pytest.mark.parametrize(
    ("place", "settings", "saved"),
    [
        ("in on_step_end", {"every": "4step", "save_last_k": 2}, [(8, "interval", 0.0), (12, "interval", 4.0)]),
        ("in on_evaluation_end", {"every": None, "monitor": "validation/loss"}, [(8, "best", 0.0), (12, "end", 4.0)]),
    ],
)
def test_the_checkpoint_of_an_interrupted_step_is_saved_with_its_metrics(
    place: str, settings: dict[str, Any], saved: list[tuple[int, str, float]], tmp_path: Path
) -> None:
    fit(BestAtEight(tmp_path, ((place, 1, 8),)), Checkpoint(**settings), Dies())
    entries = CheckpointStore(tmp_path / "run/checkpoints").entries()
    assert [(entry.step, entry.reason, entry.metrics["validation/loss"]) for entry in entries] == saved


class InSave(Callback):
    def on_save(self, run: Any, payload: dict[str, Any]) -> None:
        die(run.task, "save", run.state.step, late=True)
        run.strategy.comm.barrier()


@pytest.mark.parametrize("async_save", [False, True])
@pytest.mark.parametrize("rank", [0, 1])
def test_a_checkpoint_in_whose_save_a_rank_dies_is_saved(rank: int, async_save: bool, tmp_path: Path) -> None:
    task = Fragile(tmp_path, (("save", rank, 6),))
    fit(task, InSave(), Checkpoint(every="2step", save_last_k=None, async_save=async_save))
    entries = CheckpointStore(tmp_path / "run/checkpoints").entries()
    assert [(entry.step, entry.reason) for entry in entries] == [(step, "interval") for step in range(2, STEPS + 1, 2)]


# ---- Buffers of ranks, and what is not finite


class Rows(Fragile):
    """Writes to the rows of its samples in every third step."""

    def __init__(self, folder: Path, deaths: tuple[Death, ...] = ()) -> None:
        super().__init__(folder, deaths)
        self.register_buffer("rows", torch.zeros(len(INPUTS), dtype=torch.float64))

    def training_step(self, batch: Any) -> Any:
        outputs, mean = self.network(batch[0]).squeeze(1), self.rows.mean()
        if int(self.steps_seen) % 3 == 0:
            self.rows[batch[1]] = outputs.detach() + 1.0
        return super().training_step(batch) + squares(outputs - mean)


@pytest.mark.parametrize("is_resumed", [False, True])
def test_rows_that_the_first_steps_after_a_restart_do_not_write_are_merged(is_resumed: bool, tmp_path: Path) -> None:
    data, resume = TensorDataset(INPUTS, torch.arange(len(INPUTS))), tmp_path / "run" if is_resumed else None
    if is_resumed:
        fit(Rows(tmp_path), Checkpoint(every=None), data=data, max_duration="4step")
    task = Rows(tmp_path, () if is_resumed else (("forward", 1, 5),))
    fit(task, data=data, resume=resume)
    model, rows = network(), torch.zeros(len(INPUTS), dtype=torch.float64)

    def loss_of(batch: Tensor, step: int) -> Tensor:
        outputs, mean, first = model(batch).squeeze(1), rows.mean(), (step - 1) % EPOCH * BATCH
        if step % 3 == 1:
            rows[first : first + BATCH] = outputs.detach() + 1.0
        return squares(outputs) + squares(outputs - mean)

    assert_same(task.network, plain_loop(loss_of, model))
    torch.testing.assert_close(task.rows, rows, rtol=0, atol=1e-12)


def test_buffers_that_each_rank_has_of_its_own_are_not_handed_over() -> None:
    assert ddp(devices=2).hands_over
    assert not ddp(devices=2, broadcast_buffers=False).hands_over


class BadBatch(Fragile):
    """Has a loss that is infinite, or a gradient that is not a number, in a batch of each epoch."""

    def __init__(self, folder: Path, deaths: tuple[Death, ...], *, bad: int, what: str) -> None:
        super().__init__(folder, deaths)
        self.bad, self.what = bad, what

    def training_step(self, batch: Any) -> Any:
        loss = super().training_step(batch)
        if not (batch[0] == INPUTS[self.bad * BATCH]).any():
            return loss
        return loss + (torch.inf if self.what == "loss" else (0.0 * loss).sqrt())


@pytest.mark.parametrize(
    ("what", "bad", "death", "expected"),
    [
        ("gradient", 1, ("evaluation", 1, 5), ("memory", 7)),  # two of seven steps are skipped
        ("gradient", 3, ("in on_step_end", 1, 8), ("checkpoint", 6)),
        ("loss", 3, ("in on_step_end", 1, 8), ("checkpoint", 6)),
    ],
)
def test_a_rollback_before_or_after_a_loss_skips_the_bad_steps_and_no_hook(
    what: str, bad: int, death: Death, expected: tuple[str, int], tmp_path: Path
) -> None:
    task, keeps, model = BadBatch(tmp_path, (death,), bad=bad, what=what), Keeps(), network()
    settings = {"on_nonfinite": "rollback", "max_rollbacks": 9, "log_every": "99step", "evaluate_every": "7step"}
    fit(task, Dies(), keeps, Checkpoint(every="2step", save_last_k=None), **settings)
    plain_loop(lambda batch, step: squares(model(batch)) / ((step - 1 - bad) % EPOCH > 0), model)  # infinite where bad
    assert_same(task.network, model)
    assert keeps.steps == list(range(1, STEPS + 1))
    assert losses_of(task) == [expected]


# ---- The record of a run that has failed


class Ends(Fragile):
    """Ends its last rank in step 5 of each start."""

    def __init__(self, folder: Path, how: str) -> None:
        super().__init__(folder)
        self.how = how

    def training_step(self, batch: Any) -> Any:
        if os.environ["RANK"] == "1" and int(self.steps_seen) == 4:
            if self.how == "exit":
                os._exit(3)
            if self.how == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            time.sleep(5.0)
        return super().training_step(batch)


class NotesError(Callback):
    def on_exception(self, run: Any, error: BaseException) -> None:
        (run.task.folder / f"error of {os.environ['RANK']}").touch()


@pytest.mark.parametrize(
    ("how", "settings", "error"),
    [
        ("exit", {}, RankFailure),
        ("kill", {"max_rank_losses": 1}, RankFailure),
        ("sleep", {"timeout_seconds": 3.0}, RankTimeout),
    ],
)
def test_a_run_that_a_rank_ends_has_a_record_of_its_failure(
    how: str, settings: dict[str, Any], error: type[Exception], tmp_path: Path
) -> None:
    with pytest.raises(error):
        fit(Ends(tmp_path, how), NotesError(), strategy=ddp(devices=2, **settings))
    assert json.loads((tmp_path / "run/summary.json").read_text())["status"] == "failed"
    assert (tmp_path / "run/failure_rank_0.json").exists()
    assert (tmp_path / "error of 0").exists() or how != "sleep"
    assert not left_behind()
