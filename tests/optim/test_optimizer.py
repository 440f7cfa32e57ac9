"""Return values of configure_optimizers, and the steps of schedules."""

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler
from torch.utils.data import TensorDataset
from trainkit.strategies.ddp import DDPStrategy
from trainkit.strategies.dp import DataParallelStrategy
from trainkit.strategies.fsdp.strategy import FSDPStrategy
from trainkit.strategies.fusion import FusionStrategy
from trainkit.strategies.pipeline.strategy import PipelineStrategy
from trainkit.strategies.single import SingleStrategy
from trainkit.strategies.torch_ddp import TorchDDPStrategy

from tests.tasks import Fitting, Recorder, Regression, regression_data, seeded
from trainkit import Callback, Data, LRSchedule, TaskModule, Trainer, UserError
from trainkit.optim.chained_optimizer import ChainedOptimizer
from trainkit.testing import run_ranks

DATA = Data(train=regression_data(12), validation=regression_data(4, seed=1), batch_size=4)


class Rates(Callback):
    """Keeps the learning rate with which each step was made."""

    def __init__(self):
        self.rates = []

    def on_fit_start(self, run):
        optimizer = run.phase_optimizer.optimizer
        optimizer.register_step_pre_hook(lambda *_: self.rates.extend(group["lr"] for group in optimizer.param_groups))


def sgd(task, lr=1.0):
    return torch.optim.SGD(task.parameters(), lr=lr)


def rates(make_trainer, make_schedules, *, data=DATA, **settings):
    def configure(task):
        optimizer = sgd(task, 1.0)
        return optimizer, make_schedules(optimizer)

    seen = Rates()
    make_trainer(callbacks=[seen], **{"max_duration": "2epoch", **settings}).fit(Regression(configure), data)
    return seen.rates


def halving(optimizer):
    return lr_scheduler.ExponentialLR(optimizer, 0.5)


def test_a_plain_scheduler_steps_after_every_optimizer_step(make_trainer):
    assert rates(make_trainer, halving) == [1, 0.5, 0.25, 0.125, 0.0625, 0.03125]


def test_a_schedule_of_every_epoch_steps_after_every_epoch(make_trainer):
    halves = rates(make_trainer, lambda o: LRSchedule(halving(o), every="epoch"), max_duration="3epoch")
    assert halves == [1, 1, 1, 0.5, 0.5, 0.5, 0.25, 0.25, 0.25]


def test_a_schedule_on_a_metric_steps_after_every_validation_with_its_value(make_trainer):
    class Best(lr_scheduler.ReduceLROnPlateau):
        def step(self, metrics, epoch=None):
            values.append(metrics)
            super().step(metrics, epoch)

    values, recorder = [], Recorder()

    def configure(task):
        optimizer = sgd(task, 0.01)
        return optimizer, LRSchedule(Best(optimizer), every="metric", metric="validation/absolute")

    trainer = make_trainer(callbacks=[recorder], evaluate_every="2step", max_duration="2epoch")
    trainer.fit(Regression(configure), DATA)
    assert values == [metrics["validation/absolute"] for _, _, metrics in recorder.evaluations]
    assert len(values) == 3


def test_several_schedules_step_at_different_moments(make_trainer):
    both = rates(make_trainer, lambda o: [halving(o), LRSchedule(lr_scheduler.ExponentialLR(o, 0.1), every="epoch")])
    assert both == pytest.approx([1, 0.5, 0.25, 0.0125, 0.00625, 0.003125])


def test_schedules_may_be_a_tuple_or_a_single_one(make_trainer):
    assert rates(make_trainer, lambda o: (halving(o),)) == rates(make_trainer, halving)


def test_parameter_groups_keep_their_settings(make_trainer):
    class Groups(Regression):
        def configure_optimizers(self):
            layer = self.network[0]
            return torch.optim.SGD([{"params": [layer.weight], "lr": 0.0}, {"params": [layer.bias]}], lr=0.1)

    task = Groups()
    weight, bias = task.network[0].weight.detach().clone(), task.network[0].bias.detach().clone()
    make_trainer().fit(task, DATA)
    assert torch.equal(task.network[0].weight, weight)
    assert not torch.equal(task.network[0].bias, bias)


def test_parameters_outside_the_optimizer_do_not_change(make_trainer):
    class Half(Regression):
        def configure_optimizers(self):
            return torch.optim.SGD([self.network[0].bias], lr=0.1)

    task = Half()
    weight = task.network[0].weight.detach().clone()
    make_trainer(max_grad_norm=1.0).fit(task, DATA)
    assert torch.equal(task.network[0].weight, weight)


def test_frozen_and_unused_parameters_work(make_trainer):
    class Partly(Regression):
        def __init__(self):
            super().__init__()
            self.unused = nn.Linear(2, 2)
            self.network[0].bias.requires_grad_(False)

    for settings in ({}, {"max_grad_norm": 1.0}, {"max_grad_value": 1.0}, {"on_nonfinite": "skip"}):
        task = Partly()
        unused = task.unused.weight.detach().clone()
        assert make_trainer(**settings).fit(task, DATA).steps == 3
        assert torch.equal(task.unused.weight, unused)


def test_sparse_gradients_are_trained_on(make_trainer):
    task = Fitting(nn.Embedding(10, 2, sparse=True))
    before = task.net.weight.detach().clone()
    data = Data(train=torch.utils.data.TensorDataset(torch.tensor([1, 2, 3, 1])), batch_size=4)
    make_trainer().fit(task, data)
    expected = before.clone()
    expected[[2, 3]] *= 1 - 0.2 / 8  # of eight numbers
    expected[1] *= 1 - 0.4 / 8
    torch.testing.assert_close(task.net.weight.detach(), expected)


# ---- What is refused


def refused(make_trainer, configure, message, data=DATA, **settings):
    with pytest.raises(UserError, match=message):
        make_trainer(**settings).fit(Regression(configure), data)


@pytest.mark.parametrize(
    ("configure", "message"),
    [
        (lambda task: None, r"Regression\.configure_optimizers returned NoneType; return an optimizer, or \(optimizer"),
        (lambda task: [sgd(task), sgd(task)], r"returned list; return an optimizer, .* phases of configure_phases"),
        (
            lambda task: ([sgd(task)], ["scheduler"]),
            r"returned tuple; .* return optimizer, LRSchedule\(scheduler, every='epoch'\)",
        ),
        (lambda task: (sgd(task), sgd(task)), r"returned SGD as a schedule; return an LRScheduler or an LRSchedule"),
        (lambda task: (sgd(task), "cosine"), r"returned str as a schedule"),
        (lambda task: {"optimizer": sgd(task)}, r"returned dict; return an optimizer"),
        (lambda task: torch.optim.SGD([], lr=1), r"optimizer of Regression has no parameters; pass self\.parameters"),
        (
            lambda task: torch.optim.SGD([{"params": []}], lr=1),
            r"optimizer of Regression has no parameters; pass self\.parameters",
        ),
        (
            lambda task: sgd(nn.Linear(2, 2)),
            r"has none of the task's parameters; pass self\.parameters\(\), and make sub-modules attributes",
        ),
    ],
)
def test_an_unusable_optimizer_is_refused_with_what_to_return(make_trainer, configure, message):
    refused(make_trainer, configure, message)


def test_a_task_without_parameters_is_rejected_with_the_remedy(make_trainer):
    class Empty(TaskModule):
        def __init__(self):
            super().__init__()
            self.layers = [nn.Linear(4, 1)]  # a plain list hides them

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=0.1)

    with pytest.raises(UserError, match=r"Empty has no parameters to train; .*nn\.ModuleList"):
        make_trainer().fit(Empty(), DATA)


def test_a_parameter_without_a_shape_is_rejected_with_the_remedy(make_trainer):
    class Lazy(Regression):
        def __init__(self):
            super().__init__()
            self.extra = nn.LazyLinear(1)

    with pytest.raises(UserError, match=r"extra\.weight of Lazy has no shape .* at the end of __init__"):
        make_trainer().fit(Lazy(), DATA)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda o: LRSchedule(halving(o), every="batch"),
            r"every='batch'\): choose 'step', 'epoch', 'metric' or 'manual'",
        ),
        (lambda o: LRSchedule(halving(o), metric="validation/loss"), r"goes with metric='validation/loss'"),
        (lambda o: LRSchedule(halving(o), every="metric"), r"goes with metric='validation/loss'"),
        (lambda o: LRSchedule(lr_scheduler.ReduceLROnPlateau(o)), r"every='metric', metric='validation/loss'\)"),
        (lr_scheduler.ReduceLROnPlateau, r"needs a metric: .*Schedule\(scheduler, every='metric', metric='val"),
    ],
)
def test_a_schedule_that_cannot_step_is_refused_with_what_to_write(make_trainer, make, message):
    def configure(task):
        optimizer = sgd(task)
        return optimizer, make(optimizer)

    refused(make_trainer, configure, message)


def on_metric(metric):
    def configure(task):
        optimizer = sgd(task)
        return optimizer, LRSchedule(lr_scheduler.ReduceLROnPlateau(optimizer), every="metric", metric=metric)

    return configure


def test_a_metric_that_validation_does_not_give_is_refused_with_the_nearest(make_trainer):
    refused(
        make_trainer,
        on_metric("validation/los"),
        r"follows the metric 'validation/los', .* Did you mean 'validation/loss'\? There are: validation/absolute",
    )


def test_a_metric_that_the_sanity_batches_do_not_give_is_refused_before_the_first_step(make_trainer):
    recorder = Recorder()
    with pytest.raises(UserError, match=r"follows the metric 'validation/los', .* Did you mean 'validation/loss'"):
        make_trainer(callbacks=[recorder], num_sanity_batches=1).fit(Regression(on_metric("validation/los")), DATA)
    assert recorder.steps_of("on_step_end") == []


@pytest.mark.parametrize(
    ("data", "settings"),
    [(Data(train=regression_data(12), batch_size=4), {}), (DATA, {"evaluate_every": None})],
    ids=["no validation data", "no validation"],
)
def test_a_schedule_on_a_metric_needs_a_validation(make_trainer, data, settings):
    refused(
        make_trainer, on_metric("validation/loss"), r"nothing is validated; pass Data\(validation=", data, **settings
    )


def test_a_schedule_that_was_made_for_another_optimizer_is_refused(make_trainer):
    refused(make_trainer, lambda task: (sgd(task), halving(sgd(task))), r"another optimizer")


def test_hooks_on_an_optimizers_step_are_called(make_trainer):
    calls = []

    class Hooked(Regression):
        def configure_optimizers(self):
            optimizer = torch.optim.SGD(self.parameters(), lr=0.01)
            optimizer.register_step_pre_hook(lambda *_: calls.append("before"))
            optimizer.register_step_post_hook(lambda *_: calls.append("after"))
            return optimizer

    make_trainer(max_duration="2step").fit(Hooked(), DATA)
    assert calls == ["before", "after"] * 2


def test_a_profiler_finds_the_optimizers_step_by_its_name(make_trainer):
    # `acc_events`, or torch 2.11 warns.
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], acc_events=True) as profile:
        make_trainer(max_duration="2step").fit(Regression(), DATA)
    assert any(event.key.startswith("Optimizer.step#") for event in profile.key_averages())


# ---- A fused SGD in 16 bits on the CPU


def fused_sgd(task):
    return torch.optim.SGD(task.parameters(), lr=0.1, fused=True)


def chained_sgd(task):
    return ChainedOptimizer(fused_sgd(task))


def message_of_fit(strategy, configure=fused_sgd):
    """Return the error of training in bf16."""
    task, silent = Regression(configure, hidden=8), {"loggers": [], "report": False, "num_sanity_batches": 0}
    trainer = Trainer(strategy, precision="bf16-true", max_duration="1step", run_dir=None, **silent)
    with pytest.raises(UserError) as caught:
        trainer.fit(task, DATA)
    return str(caught.value)


def messages_of_strategies():
    strategies = [DDPStrategy, TorchDDPStrategy, FusionStrategy, FSDPStrategy, PipelineStrategy]
    return {strategy.__name__: message_of_fit(strategy(device="cpu")) for strategy in strategies}


FUSED_SGD = r"SGD(fused=True) has parameters of 16 bits on the CPU, of which torch's fused kernel updates only a few"


@pytest.mark.parametrize("configure", [fused_sgd, chained_sgd])
def test_a_fused_sgd_in_16_bits_on_the_cpu_is_refused(configure):
    for strategy in (SingleStrategy(device="cpu"), DataParallelStrategy(devices=["cpu", "cpu"])):
        message = message_of_fit(strategy, configure)
        assert FUSED_SGD in message and "remove fused=True" in message


def test_a_fused_sgd_in_16_bits_on_the_cpu_is_refused_by_every_strategy():
    for found in run_ranks(messages_of_strategies, 2):
        assert {name for name, message in found.items() if FUSED_SGD not in message} == set()


def test_a_fused_sgd_in_32_bits_trains(make_trainer):
    task, unfused = Regression(fused_sgd), Regression(lambda task: sgd(task, 0.1))
    for one in (task, unfused):
        make_trainer(max_duration="2step").fit(one, DATA)
    torch.testing.assert_close(dict(task.state_dict()), dict(unfused.state_dict()))


@pytest.mark.parametrize("limit", [{"max_grad_norm": 0.1}, {"max_grad_value": 0.02}])
def test_sparse_gradients_are_clipped_as_dense_ones(make_trainer, limit):
    words, targets = torch.arange(24) % 5 // 2, torch.randn(24, 1)

    def words_to_numbers(sparse):
        return seeded(lambda: nn.Sequential(nn.Embedding(5, 3, sparse=sparse), nn.Linear(3, 1)))

    trained = [Fitting(words_to_numbers(sparse)) for sparse in (False, True)]
    for task in trained:
        strategy = SingleStrategy(device="cpu", accumulate=2)
        trainer = make_trainer(strategy, max_duration="3step", precision="fp64", **limit)
        trainer.fit(task, Data(train=TensorDataset(words, targets), batch_size=8))
    for dense, sparse in zip(trained[0].parameters(), trained[1].parameters(), strict=True):
        torch.testing.assert_close(sparse, dense, rtol=1e-12, atol=1e-12)


class NeedsClosure(torch.optim.SGD):
    def step(self, closure):
        closure()
        return super().step()


def test_an_optimizer_that_must_be_given_a_closure_is_refused_by_name(make_trainer):
    message = r"NeedsClosure\.step must be given a closure, which .* manual = True"
    refused(make_trainer, lambda task: NeedsClosure(task.parameters(), lr=0.1), message)
