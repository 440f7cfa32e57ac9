"""A resumed run with other optimizer settings: what differs is said, and one setting chooses what counts."""

import math
from functools import partial

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import (
    ChainedScheduler,
    CosineAnnealingLR,
    ExponentialLR,
    LambdaLR,
    LinearLR,
    OneCycleLR,
    ReduceLROnPlateau,
    SequentialLR,
)
from trainkit.callbacks.checkpoint import Checkpoint

from tests.seams.training import BATCH_SIZE, BOUND, MAKE_STRATEGY, STEPS, Layers, batches, difference, samples
from trainkit import Data, LRSchedule, Phase, Trainer
from trainkit.custom_loop import session
from trainkit.errors import UserError
from trainkit.optim.optimizer_settings import OptimizerSettings

HALF = STEPS // 2


def falling(step, *, total_steps):
    return 1 - step / total_steps


def warmed_up(optimizer, total_steps):
    parts = [LinearLR(optimizer, 0.5, total_iters=2), CosineAnnealingLR(optimizer, total_steps - 2)]
    return SequentialLR(optimizer, parts, milestones=[2])


SCHEDULES = {
    "cosine": CosineAnnealingLR,
    "lambda": lambda optimizer, total_steps: LambdaLR(optimizer, partial(falling, total_steps=total_steps)),
    "one_cycle": lambda optimizer, total_steps: OneCycleLR(optimizer, 0.1, total_steps=total_steps),
    "sequential": warmed_up,
    "chained": lambda optimizer, total_steps: ChainedScheduler([CosineAnnealingLR(optimizer, total_steps)]),
}


class Scheduled(Layers):
    def __init__(self, lr=0.1, schedule="cosine", decay=0.0):
        super().__init__()
        self.lr, self.schedule, self.decay = lr, schedule, decay

    def configure_optimizers(self, total_steps):
        optimizer = torch.optim.SGD(self.parameters(), lr=self.lr, momentum=0.5, weight_decay=self.decay)
        return optimizer, SCHEDULES[self.schedule](optimizer, total_steps)


class Plain(Layers):
    def __init__(self, lr=0.1, decay=0.0):
        super().__init__()
        self.lr, self.decay = lr, decay

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=self.lr, momentum=0.5, weight_decay=self.decay)


class Reduced(Plain):
    def configure_optimizers(self):
        optimizer = super().configure_optimizers()
        schedule = ReduceLROnPlateau(optimizer, factor=0.5, patience=0, threshold=1e9)
        return optimizer, LRSchedule(schedule, every="metric", metric="validation/loss")


def fit(task, steps, *, resume=None, strategy="single", **settings):
    data = Data(train=samples(), validation=samples(), batch_size=BATCH_SIZE, shuffle=False)
    trainer = Trainer(
        MAKE_STRATEGY[strategy](),
        max_duration=f"{steps}step",
        callbacks=[Checkpoint(every=None)],
        loggers=[],
        report=False,
        num_sanity_batches=0,
        run_dir=None if resume else "run",
        **{"evaluate_every": None, **settings},
    )
    trainer.fit(task, data, resume=resume)
    return {name: tensor.detach().clone() for name, tensor in task.state_dict().items()}


def plain_loop(settings_of_step):
    """Train with the momentum kept and the settings of each step from a function of its number."""
    task = Layers()
    optimizer = torch.optim.SGD(task.parameters(), lr=0.1, momentum=0.5)
    for step, (inputs, targets) in enumerate(batches()):
        optimizer.param_groups[0].update(settings_of_step(step))
        nn.functional.mse_loss(task(inputs), targets).backward()
        optimizer.step()
        optimizer.zero_grad()
    return task.state_dict()


def settings_of_run(lr, schedule, total_steps):
    """Return what a run of `total_steps` sets before each of its steps."""
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=lr, momentum=0.5)
    scheduler, settings = SCHEDULES[schedule](optimizer, total_steps), []
    for _ in range(total_steps):
        settings.append({key: optimizer.param_groups[0][key] for key in ("lr", "momentum")})
        optimizer.step()
        scheduler.step()
    return settings


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_prolonged_run_continues_with_the_schedule_of_the_longer_run(schedule, caplog):
    fit(Scheduled(schedule=schedule), HALF)
    weights = fit(Scheduled(schedule=schedule), STEPS, resume="run")
    short, long = settings_of_run(0.1, schedule, HALF), settings_of_run(0.1, schedule, STEPS)
    assert difference(weights, plain_loop((short + long[HALF:]).__getitem__)) < BOUND
    assert "trainer.resume_optimizer=saved" in caplog.text and "schedules[0]" in caplog.text


@pytest.mark.parametrize("strategy", ["fusion_sharded", "pipeline"])
def test_settings_that_were_changed_count_after_a_resume_under_every_strategy(strategy):
    fit(Scheduled(), HALF, strategy=strategy)
    weights = fit(Scheduled(lr=0.02), STEPS, resume="run", strategy=strategy)
    short, long = settings_of_run(0.1, "cosine", HALF), settings_of_run(0.02, "cosine", STEPS)
    assert difference(weights, plain_loop((short + long[HALF:]).__getitem__)) < BOUND


def test_a_learning_rate_without_a_schedule_counts_after_a_resume(caplog):
    fit(Plain(), HALF)
    weights = fit(Plain(lr=0.02, decay=0.1), STEPS, resume="run")
    after = {"lr": 0.02, "weight_decay": 0.1}
    assert difference(weights, plain_loop(lambda step: {} if step < HALF else after)) < BOUND
    assert "param_groups[0].lr: 0.1 saved, 0.02 now" in caplog.text
    assert "param_groups[0].weight_decay: 0.0 saved, 0.1 now" in caplog.text


class WithAdam(Layers):
    def __init__(self, betas=(0.9, 0.999)):
        super().__init__()
        self.betas = betas

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=0.1, betas=self.betas)


def test_one_value_of_a_pair_counts_after_a_resume():
    fit(WithAdam(), HALF)
    weights = fit(WithAdam(betas=(0.5, 0.9)), STEPS, resume="run")
    task = WithAdam()
    optimizer = task.configure_optimizers()
    for step, (inputs, targets) in enumerate(batches()):
        if step == HALF:
            optimizer.param_groups[0]["betas"] = (0.5, 0.9)
        nn.functional.mse_loss(task(inputs), targets).backward()
        optimizer.step()
        optimizer.zero_grad()
    assert difference(weights, task.state_dict()) < BOUND


def test_saved_settings_count_if_they_are_chosen(caplog):
    fit(Plain(), HALF)
    weights = fit(Plain(lr=0.02), STEPS, resume="run", resume_optimizer="saved")
    assert difference(weights, plain_loop(lambda step: {})) < BOUND
    assert "trainer.resume_optimizer=configured" in caplog.text


def test_nothing_is_said_of_the_same_settings(caplog):
    fit(Reduced(), HALF, evaluate_every="1step")
    fit(Reduced(), STEPS, resume="run", evaluate_every="1step")
    assert not [record for record in caplog.records if "configure_optimizers" in record.getMessage()]


def test_reductions_on_a_plateau_are_kept_with_another_learning_rate():
    fit(Reduced(), HALF, evaluate_every="1step")
    task = Reduced(lr=0.01)
    weights = fit(task, STEPS, resume="run", evaluate_every="1step")
    rates = [0.1, 0.05, 0.025, 0.01 / 8, 0.01 / 16, 0.01 / 32]  # halved by each validation
    assert difference(weights, plain_loop(lambda step: {"lr": rates[step]})) < BOUND


@pytest.mark.parametrize("resume_optimizer", ["configured", "saved"])
def test_a_one_cycle_schedule_that_ends_before_the_run_is_refused_before_a_step(resume_optimizer):
    fit(Scheduled(schedule="one_cycle"), HALF)
    SCHEDULES["fixed"] = lambda optimizer, total_steps: OneCycleLR(optimizer, 0.1, total_steps=HALF)
    with pytest.raises(UserError, match=r"OneCycleLR ends after 3 steps, and the run after 6\..*total_steps"):
        fit(Scheduled(schedule="fixed"), STEPS, resume="run", resume_optimizer=resume_optimizer)
    with pytest.raises(UserError, match=r"OneCycleLR ends after 3 steps.*resume_optimizer=configured"):
        fit(Scheduled(schedule="one_cycle"), STEPS, resume="run", resume_optimizer="saved")


def test_another_schedule_takes_over_at_the_step_of_the_saved_one():
    fit(Scheduled(schedule="cosine"), HALF)
    with pytest.raises(UserError, match=r"saved with the schedule CosineAnnealingLR.*makes LambdaLR now"):
        fit(Scheduled(schedule="lambda"), STEPS, resume="run", resume_optimizer="saved")
    weights = fit(Scheduled(schedule="lambda"), STEPS, resume="run")
    settings = settings_of_run(0.1, "cosine", HALF) + settings_of_run(0.1, "lambda", STEPS)[HALF:]
    assert difference(weights, plain_loop(settings.__getitem__)) < BOUND


def test_an_unknown_choice_is_refused_with_the_nearest_name():
    with pytest.raises(UserError, match="Did you mean 'saved'"):
        Trainer(resume_optimizer="save")


class TwoPhases(Layers):
    def __init__(self, rates=(0.1, 0.2)):
        super().__init__()
        self.rates = rates

    def configure_phases(self, total_steps):
        phases = []
        for name, rate, layers in zip("xy", self.rates, ([self.a, self.b], [self.c]), strict=True):
            optimizer = torch.optim.SGD([p for layer in layers for p in layer.parameters()], lr=rate)
            phases.append(Phase(name, (optimizer, CosineAnnealingLR(optimizer, total_steps))))
        return phases

    def x_step(self, batch):
        return super().training_step(batch)

    y_step = x_step


def test_each_phase_has_its_own_settings_in_a_resumed_run(caplog):
    fit(TwoPhases(), STEPS // 2)
    weights = fit(TwoPhases(rates=(0.1, 0.05)), STEPS, resume="run")
    assert "param_groups[0].lr: 0.2 saved, 0.05 now" in caplog.text and "lr: 0.1 saved" not in caplog.text
    task = TwoPhases()
    optimizers = [torch.optim.SGD([*task.a.parameters(), *task.b.parameters()]), torch.optim.SGD(task.c.parameters())]
    for step, batch in enumerate(batches()):
        length = HALF if step < HALF else STEPS
        for optimizer, rate in zip(optimizers, (0.1, 0.2 if step < HALF else 0.05), strict=True):
            optimizer.param_groups[0]["lr"] = rate * (1 + math.cos(math.pi * step / length)) / 2
            task.zero_grad()
            task.x_step(batch).backward()
            optimizer.step()
    assert difference(weights, task.state_dict()) < BOUND


def test_a_session_chooses_the_settings_too():
    fit(Plain(), HALF)
    data = Data(train=samples(), batch_size=BATCH_SIZE, shuffle=False)
    for chosen, rate in {"saved": 0.1, "configured": 0.02}.items():
        with session("single", Plain(lr=0.02), data, resume="run", resume_optimizer=chosen) as s:
            assert s.run.phase_optimizer.optimizer.param_groups[0]["lr"] == rate


class OfOneStep(CosineAnnealingLR):
    """A schedule whose state does not say how far it is."""

    def state_dict(self):
        return {"T_max": self.T_max}


def test_a_schedule_that_does_not_say_how_far_it_is_is_refused():
    SCHEDULES["silent"] = OfOneStep
    fit(Scheduled(schedule="silent"), HALF)
    with pytest.raises(UserError, match=r"OfOneStep saves no last_epoch.*resume_optimizer=saved"):
        fit(Scheduled(schedule="silent", lr=0.02), STEPS, resume="run")


def test_a_rollback_of_a_resumed_run_counts_from_the_configured_rate():
    def made(rate):
        optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=rate)
        schedule = LRSchedule(ExponentialLR(optimizer, 0.5))  # which computes a rate from the one in the group
        return optimizer, schedule.scheduler, OptimizerSettings(optimizer, [schedule])

    def train(optimizer, scheduler, steps):
        for _ in range(steps):
            optimizer.step()
            scheduler.step()

    optimizer, scheduler, settings = made(0.1)
    train(optimizer, scheduler, 3)
    record, state, schedules = settings.record(), optimizer.state_dict(), [scheduler.state_dict()]
    optimizer, scheduler, settings = made(0.2)
    for _ in ("resume", "rollback"):
        differing = settings.differences(record, schedules)
        optimizer.load_state_dict(settings.advanced(state, schedules, saved=record, differing=differing))
        assert optimizer.param_groups[0]["lr"] == pytest.approx(0.2 * 0.5**3)
        train(optimizer, scheduler, 2)
