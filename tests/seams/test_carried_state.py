"""State that a step leaves for the next one: a buffer by rows is right everywhere, and the rest is refused by name."""

import re

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset
from trainkit.callbacks.checkpoint import Checkpoint
from trainkit.strategies.ddp.strategy import DDPStrategy
from trainkit.strategies.pipeline.strategy import PipelineStrategy
from trainkit.strategies.single import SingleStrategy

from tests.seams import training
from tests.seams.training import BATCH_SIZE, BOUND, EVERY, WIDTH, Layers, difference, samples, trained
from trainkit import Data, Trainer
from trainkit.errors import UserError


def lanes():
    """Return samples with the number of their lane; each lane has one sample in every step."""
    inputs, targets = samples().tensors
    return Data(
        train=TensorDataset(inputs, targets, torch.arange(len(inputs)) % BATCH_SIZE),
        batch_size=BATCH_SIZE,
        shuffle=False,
    )


class BufferByRows(Layers):
    """A recurrence over steps (truncated BPTT), whose state has a row for each lane."""

    def finish(self):
        self.register_buffer("state", torch.zeros(BATCH_SIZE, WIDTH, dtype=torch.float64))

    def training_step(self, batch):
        inputs, targets, lane = batch
        hidden = torch.tanh(self.a(inputs) + 0.5 * self.state[lane])
        self.state[lane] = hidden.detach()
        return nn.functional.mse_loss(self.c(torch.tanh(self.b(hidden))), targets)


class BufferOfNaN(BufferByRows):
    """The same with NaN in the rows that no step has written yet, and one row that none writes."""

    def finish(self):
        self.register_buffer("state", torch.full((BATCH_SIZE + 1, WIDTH), torch.nan, dtype=torch.float64))

    def training_step(self, batch):
        inputs, targets, lane = batch
        hidden = torch.tanh(self.a(inputs) + 0.5 * self.state[lane].nan_to_num(0.0))
        self.state[lane] = hidden.detach()
        return nn.functional.mse_loss(self.c(torch.tanh(self.b(hidden))), targets)


class Seen(Layers):
    """Marks the lanes that it has seen, by minus infinity as in a mask."""

    def finish(self):
        self.register_buffer("mask", torch.zeros(BATCH_SIZE + 1, dtype=torch.float64))
        self.mask[BATCH_SIZE] = -torch.inf  # a state that was never finite is not taken for a fault

    def training_step(self, batch):
        self.mask[batch[2]] = -torch.inf
        return super().training_step(batch[:2])


class BankAfterAWarmUp(Seen):
    """Begins with its marks in the fourth step."""

    def finish(self):
        super().finish()
        self.steps = 0

    def training_step(self, batch):
        self.steps += 1
        return super().training_step(batch) if self.steps > 3 else Layers.training_step(self, batch[:2])


class Masked(Layers):
    """Has a table that no checkpoint needs, as causal masks and rotary embeddings are."""

    def finish(self):
        self.register_buffer("table", torch.linspace(0.5, 1.0, WIDTH, dtype=torch.float64), persistent=False)

    def training_step(self, batch):
        return super().training_step((batch[0] * self.table, batch[1]))


class AttributeOfTheBatch(Layers):
    """The same with an attribute that has the rows of the last micro-batch."""

    def finish(self):
        self.hidden = None

    def training_step(self, batch):
        inputs, targets = batch[:2]
        hidden = torch.tanh(self.a(inputs) + (0.0 if self.hidden is None else 0.5 * self.hidden))
        self.hidden = hidden.detach()
        return nn.functional.mse_loss(self.c(torch.tanh(self.b(hidden))), targets)


class AttributeFromTheBeginning(AttributeOfTheBatch):
    """The same with a first state."""

    def finish(self):
        self.hidden = torch.zeros((), dtype=torch.float64)


class BufferOfAMean(Layers):
    """A running mean of features, which no rule merges."""

    def finish(self):
        self.register_buffer("mean", torch.zeros(WIDTH, dtype=torch.float64))

    def training_step(self, batch):
        features = self.a(batch[0])
        self.mean.mul_(0.5).add_(0.5 * features.detach().mean(0))
        return super().training_step(batch) + (features - self.mean).square().mean()


def plain_loop(task):
    optimizer = torch.optim.SGD(task.parameters(), lr=0.1, momentum=0.5)
    state, weights = torch.zeros(BATCH_SIZE, WIDTH, dtype=torch.float64), task
    inputs, targets = samples().tensors
    for rows, expected in zip(inputs.split(BATCH_SIZE), targets.split(BATCH_SIZE), strict=True):
        hidden = torch.tanh(weights.a(rows) + 0.5 * state)
        state = hidden.detach()
        nn.functional.mse_loss(weights.c(torch.tanh(weights.b(hidden))), expected).backward()
        optimizer.step()
        optimizer.zero_grad()
    return {**dict(task.state_dict()), "state": state}


@pytest.mark.parametrize("strategy", EVERY)
def test_a_buffer_by_rows_has_the_values_of_all_ranks(strategy, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert difference(trained(strategy, BufferByRows(), data=lanes()), plain_loop(Layers())) < BOUND


@pytest.mark.parametrize("strategy", EVERY)
def test_rows_that_are_nan_until_they_are_written_have_the_values_of_all_ranks(strategy, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    weights = trained(strategy, BufferOfNaN(), data=lanes())
    written, unwritten = weights["state"].split(BATCH_SIZE)
    assert unwritten.isnan().all()
    assert difference({**weights, "state": written}, plain_loop(Layers())) < BOUND


@pytest.mark.parametrize("strategy", [*EVERY, "ddp in micro-batches"])
def test_a_table_that_no_step_writes_to_is_no_state(strategy, tmp_path, monkeypatch, caplog):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(
        training.MAKE_STRATEGY, "ddp in micro-batches", lambda: DDPStrategy(device="cpu", devices=2, accumulate=2)
    )
    folder = tmp_path / "run"
    weights = trained(strategy, Masked(), Checkpoint(every="3step"), run_dir=str(folder))
    plain = Layers()
    optimizer = plain.configure_optimizers()
    for inputs, targets in training.batches():
        nn.functional.mse_loss(plain(inputs * Masked().table), targets).backward()
        optimizer.step()
        optimizer.zero_grad()
    assert difference(weights, plain.state_dict()) < BOUND
    messages = caplog.text + "".join(log.read_text() for log in folder.glob("rank_*.log"))
    assert not re.search(r"\btable\b", messages)


@pytest.mark.parametrize("strategy", EVERY)
def test_any_value_that_a_rank_writes_is_merged(strategy, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert (trained(strategy, Seen(), data=lanes())["mask"] == -torch.inf).all()


@pytest.mark.parametrize("strategy", ["dp", "ddp", "fusion", "fsdp"])
def test_a_buffer_that_ranks_begin_to_write_to_after_the_first_steps_is_refused(strategy, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match="mask"):
        trained(strategy, BankAfterAWarmUp(), data=lanes())


@pytest.mark.slow
def test_a_buffer_by_rows_has_the_values_of_all_replicas_of_a_pipeline(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(
        training.MAKE_STRATEGY, "2x2", lambda: PipelineStrategy(device="cpu", stages=2, replicas=2, accumulate=2)
    )
    assert difference(trained("2x2", BufferByRows(), data=lanes()), plain_loop(Layers())) < BOUND


@pytest.mark.parametrize("strategy", ["single", "dp", "pipeline"])
def test_an_attribute_that_micro_batches_hand_to_each_other_is_refused(strategy, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match="hidden"):
        trained(strategy, AttributeFromTheBeginning())


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_an_attribute_of_the_batch_is_right_with_one_micro_batch_a_rank(strategy, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    reference = plain_loop(Layers())
    del reference["state"]
    assert difference(trained(strategy, AttributeOfTheBatch(), data=lanes()), reference) < BOUND


@pytest.mark.parametrize("strategy", ["single", "dp", "ddp", "fsdp", "pipeline"])
def test_a_buffer_that_every_rank_computes_from_its_samples_is_refused(strategy, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match="mean"):
        trained(strategy, BufferOfAMean())


class CountedAfterAWarmUp(BankAfterAWarmUp):
    """Counts samples by a rule that differs by rank, and notes the lanes in integers, from the fourth step on."""

    def finish(self):
        super().finish()
        self.register_buffer("positive", torch.zeros((), dtype=torch.int64))
        self.register_buffer("seen", torch.zeros(BATCH_SIZE, dtype=torch.int64))

    def training_step(self, batch):
        self.steps += 1
        if self.steps > 3:
            self.positive += (batch[1] > 0).sum()
            self.seen[batch[2]] += 1
        return Layers.training_step(self, batch[:2])


@pytest.mark.parametrize("strategy", ["ddp", "fusion", "fsdp"])
def test_integers_that_ranks_begin_to_count_after_the_first_steps_are_merged_from_then_on(
    strategy, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    weights = trained(strategy, CountedAfterAWarmUp(), data=lanes())
    assert (weights["seen"] >= 1).all()  # in the last step, on whichever rank has the lane


class MeanAfterAWarmUp(BufferOfAMean):
    def finish(self):
        super().finish()
        self.steps = 0

    def training_step(self, batch):
        self.steps += 1
        # Micro-batches count too: from the third step on.
        return super().training_step(batch) if self.steps > 4 else Layers.training_step(self, batch)


def test_a_buffer_that_micro_batches_begin_to_share_after_the_first_steps_is_refused(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match="mean"):
        trained("single", MeanAfterAWarmUp())


class Counted(Layers):
    """Counts its steps in an attribute, and its samples in a buffer that is not saved."""

    def finish(self):
        self.steps, self.last_loss = 0, 0.0
        self.register_buffer("samples", torch.zeros((), dtype=torch.int64), persistent=False)

    def training_step(self, batch):
        self.steps += 1
        self.samples += len(batch[0])
        loss = super().training_step(batch)
        self.last_loss = float(loss.detach())
        return loss


class CountedAndSaved(Counted):
    def get_extra_state(self):
        return torch.tensor(self.steps)

    def set_extra_state(self, state):
        self.steps = int(state)


@pytest.mark.parametrize(("make", "names"), [(Counted, "steps, samples"), (CountedAndSaved, None), (Layers, None)])
def test_the_first_save_names_state_that_no_checkpoint_has(make, names, tmp_path, monkeypatch, caplog):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(training.MAKE_STRATEGY, "one", lambda: SingleStrategy(device="cpu"))
    trained("one", make(), Checkpoint(every="2step"), run_dir=str(tmp_path / "run"))
    warnings = [each.getMessage() for each in caplog.records if "leave state for the next one" in each.getMessage()]
    assert [f"in {names}, which checkpoints do not have" in text for text in warnings] == [True] * (names is not None)


class History(Layers):
    """Weights its loss by the mean of earlier ones."""

    def finish(self):
        self.history = []

    def training_step(self, batch):
        loss = super().training_step(batch)
        self.history.append(float(loss.detach()))
        return loss * (sum(self.history) / len(self.history))


def test_numbers_that_ranks_change_by_their_samples_are_named(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    trained("ddp", History(), log_every="4step", run_dir=str(tmp_path / "run"))
    assert "History changes history by the samples of each rank" in (tmp_path / "run" / "rank_0.log").read_text()


@pytest.mark.parametrize("strategy", ["single", "dp", "ddp", "fsdp", "pipeline"])
def test_a_buffer_by_rows_goes_on_after_a_resume(strategy, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    folder, task = str(tmp_path / "run"), BufferByRows()
    trained(strategy, BufferByRows(), Checkpoint(every="3step"), data=lanes(), run_dir=folder, max_duration="3step")
    settings = {"max_duration": "1epoch", "callbacks": [], "loggers": [], "run_dir": folder}
    Trainer(training.MAKE_STRATEGY[strategy](), **settings).fit(task, lanes(), resume=folder)
    assert difference(task.state_dict(), plain_loop(Layers())) < BOUND
