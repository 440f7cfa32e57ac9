"""States that user code saves: buffers that grow, numpy's types, and what no checkpoint can hold."""

import copy
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import IterableDataset
from trainkit.callbacks.checkpoint import Checkpoint
from trainkit.strategies.single import SingleStrategy

from tests.seams.training import BATCH_SIZE, BOUND, MAKE_STRATEGY, STEPS, Layers, batches, difference, samples
from trainkit import Callback, Data, Trainer
from trainkit.checkpoint.serialization import plain
from trainkit.checkpoint.store import CheckpointStore
from trainkit.errors import CheckpointError, UserError

HALF = STEPS // 2


class Bank(nn.Module):
    """Rows that it has seen, with its own way of loading, as banks of features have."""

    def __init__(self):
        super().__init__()
        self.register_buffer("rows", torch.zeros(0, 1))

    def _load_from_state_dict(self, state_dict, prefix, *args):
        self.rows = torch.zeros_like(state_dict[f"{prefix}rows"])
        super()._load_from_state_dict(state_dict, prefix, *args)


class Growing(Layers):
    """Its buffers get another shape in each step; the loss depends on all of them."""

    def build(self):
        self.bank = Bank()
        self.register_buffer("grown", torch.zeros(1))
        self.register_buffer("latest", None)

    def training_step(self, batch):
        inputs, targets = batch
        predicted = self(inputs)
        latest = 0.0 if self.latest is None else self.latest.mean()
        loss = nn.functional.mse_loss(predicted, targets) * (1 + self.grown.sum() + latest) + 0.0 * predicted.sum()
        loss = loss + self.bank.rows.sum() * predicted.mean()
        mean = inputs.detach().mean().reshape(1)
        self.grown = torch.cat([self.grown, mean])
        self.latest = inputs.detach().mean(0)
        self.bank.rows = torch.cat([self.bank.rows, mean[:, None]])
        return loss


class GrowingAlike(Growing):
    """The same on all ranks: what it keeps does not depend on their samples."""

    def training_step(self, batch):
        loss = super().training_step(batch)
        self.grown[-1] = len(self.grown)
        self.latest = torch.full_like(self.latest, len(self.grown))
        self.bank.rows = torch.full_like(self.bank.rows, len(self.grown))
        return loss


class Observer(Layers):
    """Scaled by the range of the weights, which an observer of channels follows; it has no shape at first."""

    def build(self):
        self.observer = torch.ao.quantization.MovingAveragePerChannelMinMaxObserver()

    def training_step(self, batch):
        self.observer(self.a.weight)
        return nn.functional.mse_loss(self(batch[0]) * self.observer.max_val.mean(), batch[1])


def fit(task, steps, *callbacks, resume=None, strategy="single", data=None, checkpoint=None):
    data = data or Data(train=samples(), validation=samples(), batch_size=BATCH_SIZE, shuffle=False)
    settings = {"loggers": [], "report": False, "num_sanity_batches": 0, "evaluate_every": None}
    where = {} if resume else {"run_dir": "run"}
    checkpoint = checkpoint or Checkpoint(every=None)
    # A buffer that grows in each micro-batch is refused where a step has several.
    made = SingleStrategy(device="cpu") if strategy == "single" else MAKE_STRATEGY[strategy]()
    trainer = Trainer(made, max_duration=f"{steps}step", callbacks=[*callbacks, checkpoint], **settings, **where)
    trainer.fit(task, data, resume=resume)
    return copy.deepcopy(task.state_dict())


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def plain_loop(task):
    optimizer = torch.optim.SGD(task.parameters(), lr=0.1, momentum=0.5)
    for inputs, targets in batches():
        task.training_step((inputs, targets)).backward()
        optimizer.step()
        optimizer.zero_grad()
    return task.state_dict()


@pytest.mark.parametrize("kind", [Growing, Observer])
def test_buffers_that_were_resized_are_resumed_and_evaluated(kind):
    trained = fit(kind(), HALF)
    task = kind()
    resumed = fit(task, STEPS, resume="run")
    assert difference(resumed, plain_loop(kind())) < BOUND
    again = kind()
    Trainer("single", loggers=[], callbacks=[]).validate(
        again, Data(validation=samples(), batch_size=8), checkpoint="run"
    )
    assert difference(again.state_dict(), resumed) == 0
    assert trained.keys() == resumed.keys()


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_buffers_that_were_resized_arrive_in_the_task_and_are_resumed_on_ranks(strategy):
    trained = fit(GrowingAlike(), HALF, strategy=strategy)
    assert trained["grown"].shape == (1 + HALF,) and trained["latest"].shape == (8,)
    resumed = fit(GrowingAlike(), STEPS, resume="run", strategy=strategy)
    assert resumed["grown"].tolist() == [0.0, *range(2, 2 + STEPS)]


def test_a_buffer_that_grows_by_the_samples_of_a_rank_is_refused():
    with pytest.raises(UserError, match=r"each rank has other values for (grown|bank\.rows), a buffer"):
        fit(Growing(), HALF, strategy="ddp")


def test_a_buffer_of_another_shape_than_the_settings_make_is_still_refused():
    class Wider(Growing):
        def build(self):
            super().build()
            self.register_buffer("table", torch.zeros(size))

    size = 3
    fit(Wider(), HALF)
    size = 4
    with pytest.raises(CheckpointError, match=r"table: \(3,\) saved, \(4,\) expected"):
        fit(Wider(), STEPS, resume="run")


class Saves(Callback):
    def __init__(self, value):
        self.value, self.loaded = value, None

    def state_dict(self):
        return {"deep": [{"value": self.value}]}

    def load_state_dict(self, saved):
        self.loaded = saved["deep"][0]["value"]


ARRAYS = [
    np.arange(6, dtype=np.uint8).reshape(2, 3)[:, ::-1],
    np.array(2.5, dtype=np.float32),
    np.zeros((0, 2), dtype=np.complex64),
    np.array([True, False]),
    np.asfortranarray(np.arange(6.0).reshape(2, 3)),
]
SCALARS = [np.float64(0.5), np.float32(0.1), np.int16(3), np.bool_(True), np.complex64(1j)]


@pytest.mark.parametrize("background", [False, True])
def test_arrays_and_numbers_of_numpy_come_back_as_they_were(background):
    value = {"arrays": ARRAYS, "scalars": tuple(SCALARS), "same": [np.full(3, k) for k in range(9)]}
    fit(Layers(), HALF, Saves(value), checkpoint=Checkpoint(every="1step", async_save=background))
    saves = Saves(None)
    fit(Layers(), STEPS, saves, resume="run")
    for name, given in value.items():
        for saved, loaded in zip(given, saves.loaded[name], strict=True):
            assert type(loaded) is type(saved) and loaded.dtype == saved.dtype
            np.testing.assert_array_equal(loaded, saved)


class WithExtraState(Layers):
    def __init__(self, value=None):
        super().__init__()
        self.value = value

    def get_extra_state(self):
        return {"value": self.value}

    def set_extra_state(self, state):
        self.value = state["value"]


@pytest.mark.parametrize("strategy", ["single", "pipeline"])
def test_an_array_in_extra_state_comes_back_as_it_was(strategy):
    array = np.arange(4, dtype=np.int32)
    fit(WithExtraState(array), HALF, strategy=strategy)
    task = WithExtraState()
    fit(task, STEPS, resume="run", strategy=strategy)
    assert type(task.value) is np.ndarray and task.value.dtype == np.int32 and task.value.tolist() == [0, 1, 2, 3]


@pytest.mark.parametrize("value", [np.array(["2020-01-01"], dtype="datetime64"), np.array([1], dtype=">i4")])
def test_an_array_that_no_tensor_can_hold_is_refused(value):
    with pytest.raises(UserError, match=r"cannot hold the value at 'a': numpy\.ndarray"):
        plain({"a": value})


def test_a_set_and_keys_hold_numbers_of_numpy(tmp_path):
    store = CheckpointStore(tmp_path / "store")
    loaded = store.load(store.save({"set": {np.int64(3)}, "keys": {np.float32(0.5): 1}}, name="a", step=0, epoch=0))
    assert loaded == {"set": {3}, "keys": {0.5: 1}}


class Factor:
    def __init__(self, origin):
        self.origin = origin

    def __call__(self, step):
        return 1.0


class ScheduledByObject(Layers):
    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
        return optimizer, LambdaLR(optimizer, Factor(Path("curve")))


class WithPathInGroup(Layers):
    def configure_optimizers(self):
        return torch.optim.SGD([{"params": self.parameters(), "origin": Path("x")}], lr=0.1)


class Stream(IterableDataset):
    def __iter__(self):
        yield from samples()

    def state_dict(self):
        return {"file": Path("a.txt")}

    def load_state_dict(self, saved):
        pass


class CountSteps(Callback):
    steps = 0

    def on_step_end(self, run):
        self.steps += 1


UNSAVABLE = {
    "callback": (Layers, [Saves(Path("x"))], r"'callbacks\.Saves\.deep\[0\]\.value': pathlib\..*save str\(value\)"),
    "extra state": (lambda: WithExtraState(Path("x")), [], r"'task\._extra_state\.value': pathlib"),
    "schedule": (ScheduledByObject, [], r"'schedules\[0\]\.lr_lambdas\[0\]\.origin': pathlib"),
    "group": (WithPathInGroup, [], r"'optimizer\.param_groups\[0\]\.origin': pathlib"),
}


@pytest.mark.parametrize("place", UNSAVABLE)
def test_a_state_that_cannot_be_saved_is_refused_before_the_first_step(place):
    make_task, callbacks, message = UNSAVABLE[place]
    counter = CountSteps()
    with pytest.raises(UserError, match=message):
        fit(make_task(), HALF, counter, *callbacks)
    assert counter.steps == 0


def test_a_dataset_whose_state_cannot_be_saved_is_refused_before_the_first_step():
    counter = CountSteps()
    with pytest.raises(UserError, match=r"'loader\.dataset\.file': pathlib"):
        fit(Layers(), HALF, counter, data=Data(train=Stream(), batch_size=BATCH_SIZE))
    assert counter.steps == 0


def test_a_run_without_checkpoints_may_have_any_state():
    Trainer("single", max_duration="1step", callbacks=[Saves(Path("x"))], loggers=[]).fit(
        Layers(), Data(train=samples(), batch_size=BATCH_SIZE)
    )
