import pytest
import torch
from torch.utils.data import TensorDataset
from trainkit.strategies.ddp.strategy import DDPStrategy
from trainkit.strategies.single import SingleStrategy

from tests.tasks import Regression, adamw, flat
from tests.tasks import fit as train
from trainkit import Data, Trainer, UserError
from trainkit.optim.optimizer import MEMORY_STEPS, WARM_UP_STEPS, SpikeDetector

SPIKE = WARM_UP_STEPS + 4  # counted from 0
STEPS = WARM_UP_STEPS + 8
BATCH = 4


def line(optimizer="fused"):
    return Regression(rmsprop if optimizer == "not fused" else adamw)


def rmsprop(task):
    return torch.optim.RMSprop(task.parameters(), lr=0.01)


def samples(spikes=(SPIKE,)):
    generator = torch.Generator().manual_seed(2)
    x = torch.randn(STEPS * BATCH, 4, generator=generator)
    for step in spikes:
        x[step * BATCH : (step + 1) * BATCH] *= 1000
    return x, x.sum(dim=1, keepdim=True) + 0.1 * torch.randn(len(x), 1, generator=generator)


def fit(task, tmp_path, strategy=None, *, duration=f"{STEPS}step", resume=None, spikes=(SPIKE,), callbacks=()):
    data = Data(train=TensorDataset(*samples(spikes)), batch_size=BATCH, shuffle=False)
    settings = {"max_duration": duration, "run_dir": tmp_path, "log_every": "1step", "skip_grad_norm_factor": 10}
    return train(strategy or SingleStrategy(), task, data, *callbacks, resume=resume, **settings)


def by_hand(*, skipped, optimizer="fused"):
    task = line(optimizer)
    steps = task.configure_optimizers()
    x, y = samples()
    for step in range(STEPS):
        if step in skipped:
            continue
        rows = slice(step * BATCH, (step + 1) * BATCH)
        steps.zero_grad()
        task.training_step((x[rows], y[rows])).backward()
        steps.step()
    return flat(task)


@pytest.mark.parametrize("optimizer", ["fused", "not fused"])
def test_a_step_with_a_spike_changes_nothing(optimizer, tmp_path):
    task = line(optimizer)
    result = fit(task, tmp_path)
    expected = by_hand(skipped={SPIKE}, optimizer=optimizer)
    torch.testing.assert_close(flat(task), expected, rtol=0, atol=1e-6)
    assert not torch.allclose(expected, by_hand(skipped=set(), optimizer=optimizer), atol=1e-3)
    assert result.metrics["train/skipped_steps"] == 1


def test_two_ranks_skip_the_same_step(tmp_path):
    task = line()
    fit(task, tmp_path, DDPStrategy(devices=2))
    torch.testing.assert_close(flat(task), by_hand(skipped={SPIKE}), rtol=0, atol=1e-5)


def test_a_resumed_run_keeps_the_average(tmp_path):
    task = line()
    fit(task, tmp_path, duration=f"{SPIKE - 1}step", callbacks=["checkpoint"])
    resumed = line()
    fit(resumed, tmp_path, resume=tmp_path)
    whole = line()
    fit(whole, tmp_path / "whole")
    assert torch.equal(flat(resumed), flat(whole))


def test_the_first_steps_are_never_spikes(tmp_path):
    result = fit(line(), tmp_path, spikes=(WARM_UP_STEPS - 1,))
    assert result.metrics["train/skipped_steps"] == 0


def test_only_usual_steps_move_the_average():
    watch = SpikeDetector(3.0)
    for _ in range(WARM_UP_STEPS):
        assert not watch.is_spike(torch.tensor(2.0))
    assert watch.is_spike(torch.tensor(6.1))
    assert watch.is_spike(torch.tensor(float("nan")))
    assert watch.is_spike(torch.tensor(float("inf")))
    assert not watch.is_spike(torch.tensor(5.9))
    seen = watch.state_dict()["seen"]
    assert seen == pytest.approx([WARM_UP_STEPS + 1, 2.0 + 3.9 / (WARM_UP_STEPS + 1)])


def test_the_average_follows_a_gradient_that_grows_slowly():
    watch = SpikeDetector(2.0)
    norms = [1.005**step for step in range(10 * MEMORY_STEPS)]  # the average stays a third behind
    assert not any(watch.is_spike(torch.tensor(norm)) for norm in norms)


@pytest.mark.parametrize("factor", [1, 0.5, True, "10"])
def test_a_factor_that_calls_usual_steps_spikes_is_refused(factor):
    with pytest.raises(UserError, match=r"skip_grad_norm_factor must be .*a number above 1"):
        Trainer(skip_grad_norm_factor=factor)


def test_skip_grad_norm_factor_is_refused_with_fp16(tmp_path):
    trainer = Trainer(precision="fp16-mixed", skip_grad_norm_factor=10, run_dir=tmp_path, callbacks=[], loggers=[])
    with pytest.raises(UserError, match="fp16-mixed"):
        trainer.fit(line(), Data(train=TensorDataset(*samples()), batch_size=BATCH))
