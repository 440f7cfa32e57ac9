"""Parameters that are unfrozen, added to the optimizer, or taken out of it during the run."""

import pytest
import torch
from torch import nn
from trainkit.callbacks.checkpoint import Checkpoint
from trainkit.strategies.ddp.strategy import DDPStrategy

from tests.seams.training import BOUND, EVERY, MAKE_STRATEGY, Layers, batches, difference, samples, trained
from trainkit import Callback, Data, Phase, Trainer
from trainkit.errors import UserError
from trainkit.optim.chained_optimizer import ChainedOptimizer


@pytest.fixture(autouse=True)
def _in_a_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


class Frozen(Layers):
    """Its first layer is frozen until step 2, a bias from step 4 on, and another one until step 5."""

    def finish(self):
        self.a.requires_grad_(False)
        self.b.bias.requires_grad_(False)

    def change(self, step, optimizer):
        if step == 2:
            self.a.requires_grad_(True)
        if step == 4:
            self.c.bias.requires_grad_(False)
        if step == 5:
            self.b.bias.requires_grad_(True)


class Head(Layers):
    """Its optimizer has the last layer, gets the second at step 2 and the first at 4, and loses a bias at 5."""

    def finish(self):
        self.a.requires_grad_(False)

    def change(self, step, optimizer):
        if step == 2:
            optimizer.add_param_group({"params": list(self.b.parameters()), "lr": 0.05})
        if step == 4:
            self.a.requires_grad_(True)
            optimizer.add_param_group({"params": list(self.a.parameters())})
        if step == 5:
            optimizer.param_groups[0]["params"].pop()

    def configure_optimizers(self):
        return torch.optim.AdamW(self.c.parameters(), lr=0.02)


class Change(Callback):
    def __init__(self, moment="on_step_end"):
        setattr(self, moment, self.change)

    def change(self, run):
        run.task.change(run.state.step, run.phase_optimizers[0].optimizer)


def plain_loop(make_task, *, max_grad_norm=None):
    task = make_task()
    optimizer = task.configure_optimizers()
    task.change(0, optimizer)
    for step, batch in enumerate(batches(), start=1):
        task.training_step(batch).backward()
        if max_grad_norm is not None:
            nn.utils.clip_grad_norm_([p for group in optimizer.param_groups for p in group["params"]], max_grad_norm)
        optimizer.step()
        optimizer.zero_grad()
        task.change(step, optimizer)
    return task.state_dict()


@pytest.mark.parametrize("strategy", EVERY)
def test_parameters_that_are_unfrozen_between_steps_are_trained_with_the_whole_batch(strategy):
    assert difference(trained(strategy, Frozen(), Change()), plain_loop(Frozen)) < BOUND


class FrozenBody(Head):
    """The second layer is frozen too, until it comes into the optimizer."""

    def finish(self):
        self.a.requires_grad_(False)
        self.b.requires_grad_(False)

    def change(self, step, optimizer):
        if step == 2:
            self.b.requires_grad_(True)
        super().change(step, optimizer)


@pytest.mark.parametrize(
    ("strategy", "make_task", "max_grad_norm"),
    [
        *((name, Head, 0.05) for name in EVERY if name != "fusion_sharded"),
        ("single", Head, None),
        ("fusion_sharded", FrozenBody, None),
        ("fusion_sharded", FrozenBody, 0.05),
    ],
)
def test_parameters_that_come_into_the_optimizer_are_zeroed_clipped_and_stepped(strategy, make_task, max_grad_norm):
    weights = trained(strategy, make_task(), Change(), max_grad_norm=max_grad_norm)
    assert difference(weights, plain_loop(make_task, max_grad_norm=max_grad_norm)) < BOUND


def test_gradients_of_earlier_steps_are_refused_where_no_rank_has_their_sum():
    with pytest.raises(UserError, match=r"b\.weight came into the optimizer.*shard_optimizer=true"):
        trained("fusion_sharded", Head(), Change())


class UnfrozenInTheStep(Frozen):
    """The step itself unfreezes the first layer."""

    calls = 0

    def training_step(self, batch):
        self.calls += 1
        if self.calls == 3:
            self.a.requires_grad_(True)
        return super().training_step(batch)


@pytest.mark.parametrize("strategy", ["dp", "ddp", "torch_ddp", "fusion_sharded"])
def test_parameters_that_a_step_unfreezes_are_refused_in_this_step(strategy):
    with pytest.raises(UserError, match=r"a\.weight got a gradient in this step.*on_step_end"):
        trained(strategy, UnfrozenInTheStep())


class UnfrozenInEveryStep(Frozen):
    def training_step(self, batch):
        self.a.requires_grad_(True)
        return super().training_step(batch)


@pytest.mark.parametrize("make_task", [UnfrozenInTheStep, UnfrozenInEveryStep])
def test_parameters_that_a_step_of_a_pipeline_unfreezes_are_refused(make_task):
    with pytest.raises(UserError, match=r"the step has unfrozen a\.weight.*in a callback's on_step_end"):
        trained("pipeline", make_task())


def test_parameters_unfrozen_before_the_first_step_are_trained_with_the_whole_batch():
    class Early(Frozen):
        def change(self, step, optimizer):
            self.a.requires_grad_(True)

    reference = plain_loop(Early)
    assert difference(trained("torch_ddp", Frozen(), Unfreeze()), reference) < BOUND
    assert difference(trained("ddp", Frozen(), Unfreeze()), reference) < BOUND


class Unfreeze(Callback):
    def on_fit_start(self, run):
        run.task.a.requires_grad_(True)


def test_unfreezing_is_refused_where_communication_keeps_state_of_gradients(monkeypatch):
    monkeypatch.setitem(MAKE_STRATEGY, "ddp", lambda: DDPStrategy(device="cpu", devices=2, comm_hook="power_sgd"))
    with pytest.raises(UserError, match=r"a\.weight was unfrozen or added during.*Set strategy\.comm_hook=none"):
        trained("ddp", Frozen(), Change())


def test_an_optimizer_that_steps_in_backward_takes_in_parameters(monkeypatch):
    def in_backward():
        return DDPStrategy(device="cpu", devices=2, optimizer_in_backward=True)

    monkeypatch.setitem(MAKE_STRATEGY, "ddp", in_backward)
    assert difference(trained("ddp", FrozenBody(), Change()), plain_loop(FrozenBody)) < BOUND


class Moments(Frozen):
    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=0.02)


class Continue(Change):
    """Unfreezes again in a resumed run."""

    def on_fit_start(self, run):
        for step in range(run.state.step + 1):
            run.task.change(step, run.phase_optimizers[0].optimizer)


@pytest.mark.parametrize("strategy", ["ddp", "fusion_sharded"])
def test_a_resumed_run_continues_with_the_moments_of_unfrozen_parameters(strategy):
    saving = Checkpoint(every="1step", save_last_k=None)
    reference = plain_loop(Moments)
    assert difference(trained(strategy, Moments(), saving, Change(), run_dir="run"), reference) < BOUND
    resumed = Moments()
    data = Data(train=samples(), batch_size=8, shuffle=False)
    settings = {"max_duration": "1epoch", "loggers": [], "callbacks": [Continue()], "run_dir": "run"}
    Trainer(MAKE_STRATEGY[strategy](), **settings).fit(resumed, data, resume="run/checkpoints/step_00000003.pt")
    assert difference(resumed.state_dict(), reference) < BOUND


class Alternating(Layers):
    """Two phases; the first layer, of the first phase, is frozen until step 2."""

    def finish(self):
        self.a.requires_grad_(False)

    def configure_phases(self):
        first = [*self.a.parameters(), *self.b.parameters()]
        return [
            Phase("body", torch.optim.SGD(first, lr=0.1, momentum=0.5)),
            Phase("head", torch.optim.SGD(self.c.parameters(), lr=0.1)),
        ]

    def body_step(self, batch):
        return Layers.training_step(self, batch)

    def head_step(self, batch):
        return Layers.training_step(self, batch)

    def change(self, step, optimizer):
        if step == 2:
            self.a.requires_grad_(True)


@pytest.mark.parametrize("strategy", ["single", "ddp"])
def test_parameters_of_a_phase_are_unfrozen_for_this_phase_only(strategy):
    task = Alternating()
    body, head = (phase.optimizer for phase in task.configure_phases())
    for step, batch in enumerate(batches(), start=1):
        for optimizer in (body, head):
            task.body_step(batch).backward()
            optimizer.step()
            task.zero_grad()
        task.change(step, None)
    assert difference(trained(strategy, Alternating(), Change()), task.state_dict()) < BOUND


def test_a_group_for_a_chained_optimizer_names_its_member():
    task = Layers()
    chain = ChainedOptimizer(torch.optim.SGD(task.a.parameters(), lr=0.1), torch.optim.AdamW(task.b.parameters()))
    chain.add_param_group({"params": list(task.c.parameters()), "optimizer": 1})
    task.training_step(next(batches())).backward()
    chain.step()
    assert chain.state[task.c.weight]["step"] == 1
    with pytest.raises(UserError, match="names its optimizer by index"):
        chain.add_param_group({"params": [nn.Parameter(torch.zeros(1))]})
    chain.optimizers[0].add_param_group({"params": [nn.Parameter(torch.zeros(1))]})
    with pytest.raises(UserError, match="add it to the ChainedOptimizer"):
        chain.check_members()
