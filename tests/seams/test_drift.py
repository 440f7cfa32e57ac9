"""Replicas drift apart where a step or a callback writes to weights: they are compared, and the run ends by name."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from tests.seams.training import BATCH_SIZE, BOUND, EVERY, STEPS, Layers, batches, difference, samples, trained
from trainkit import Callback, Data
from trainkit.errors import UserError
from trainkit.loops.replica_check import ReplicaCheck

RANKS = ("ddp", "torch_ddp", "fusion", "fusion_sharded")


class Renormalised(Layers):
    def build(self):
        self.embedding = nn.Embedding(6, 8, max_norm=0.5)

    def forward(self, inputs):
        return super().forward(inputs + self.embedding((inputs[:, 0] * 100).long() % 6))


class Centres(Layers):
    """A centre loss, whose centres follow the features of the batch."""

    def build(self):
        self.centres = nn.Parameter(torch.zeros(8), requires_grad=False)

    def training_step(self, batch):
        features = self.a(batch[0])
        loss = super().training_step(batch) + (features - self.centres).square().mean()
        with torch.no_grad():
            self.centres.mul_(0.9).add_(0.1 * features.mean(0))
        return loss


class FromRandomNumbers(Callback):
    """Writes to a weight what each rank draws by itself, in the fourth step."""

    def on_step_end(self, run):
        if run.state.step == 4:
            with torch.no_grad():
                run.task.b.weight += 0.01 * torch.randn_like(run.task.b.weight)


def plain_loop(task):
    optimizer = torch.optim.SGD([p for p in task.parameters() if p.requires_grad], lr=0.1, momentum=0.5)
    for batch in batches():
        task.training_step(batch).backward()
        optimizer.step()
        optimizer.zero_grad()
    return task.state_dict()


@pytest.mark.parametrize(("make", "name"), [(Renormalised, "embedding.weight"), (Centres, "centres")])
@pytest.mark.parametrize("strategy", EVERY)
def test_a_step_that_writes_to_a_parameter_from_its_samples_is_refused(strategy, make, name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError) as error:
        trained(strategy, make(), log_every="100step")
    assert name in str(error.value) and "strategy=ddp" not in str(error.value)


def test_on_one_process_with_one_micro_batch_it_trains_as_in_a_plain_loop(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    from trainkit.strategies.single import SingleStrategy

    from tests.seams import training

    monkeypatch.setitem(training.MAKE_STRATEGY, "one", lambda: SingleStrategy(device="cpu"))
    for make in (Renormalised, Centres):
        assert difference(trained("one", make()), plain_loop(make())) < BOUND


@pytest.mark.parametrize("settings", [{"log_every": "5step"}, {"log_every": "100step"}], ids=["logged", "at the end"])
@pytest.mark.parametrize("strategy", ["ddp", "fusion"])
def test_a_callback_that_makes_replicas_differ_ends_the_run(strategy, settings, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match=r"b\.weight has other values on other ranks"):
        trained(strategy, Layers(), FromRandomNumbers(), **settings)


def two_replicas(step):
    """Return the state of a run of two ranks that begins after this step, and its check."""
    state = SimpleNamespace(step=step, evaluation_due=False)
    strategy = SimpleNamespace(comm=SimpleNamespace(world_size=2))
    return state, ReplicaCheck(SimpleNamespace(state=state, task=nn.Linear(1, 1), strategy=strategy))


@pytest.mark.parametrize(("first", "compared"), [(0, [1, 2, 4, 8, 16, 32, 64, 128, 256, 456]), (7, [8, 9, 11, 15, 23])])
def test_comparisons_become_rarer_up_to_every_two_hundredth_step(first, compared):
    state, check = two_replicas(first)
    due = []
    for state.step in range(first + 1, compared[-1] + 1):
        due += [state.step] if check.is_due() else []
    assert due == compared


def test_log_points_far_apart_are_all_compared_and_so_is_the_first_one_after_a_rollback():
    state, check = two_replicas(0)
    for state.step in (200, 400, 600, 350):
        assert check.is_due()


class Counted(Layers):
    """Has a buffer that only a callback writes to."""

    def build(self):
        self.register_buffer("seen", torch.zeros(8))


class WritesToABuffer(Callback):
    def on_step_end(self, run):
        if run.state.step == STEPS:
            run.task.seen += torch.randn(8)


@pytest.mark.parametrize("settings", [{}, {"evaluate_every": "1epoch"}], ids=["at the end", "before an evaluation"])
def test_buffers_that_begin_to_differ_between_comparisons_end_the_run(settings, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    data = Data(train=samples(), validation=samples(), batch_size=BATCH_SIZE, shuffle=False) if settings else None
    with pytest.raises(UserError, match="seen has other values on other ranks"):
        trained("ddp", Counted(), WritesToABuffer(), data=data, log_every="1step", **settings)
