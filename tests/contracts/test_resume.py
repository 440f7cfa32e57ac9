"""A run that is stopped and resumed is bit-equal to one that was never stopped (contract C6)."""

import os
import random
import signal

import numpy as np
import pytest
import torch
from torch.optim import lr_scheduler
from torch.utils.data import DataLoader, Dataset, IterableDataset, RandomSampler, WeightedRandomSampler
from trainkit.callbacks.checkpoint import Checkpoint
from trainkit.callbacks.early_stopping import EarlyStopping
from trainkit.strategies.single import SingleStrategy

from tests.tasks import (
    EachStep,
    MemoryLogger,
    Recorder,
    Regression,
    SaveAtEnd,
    Seen,
    StopAt,
    WeightedRegression,
    adamw,
    assert_close,
    assert_same_bits,
    regression_data,
    sgd,
    weighted_data,
)
from trainkit import Callback, Data, LRSchedule
from trainkit.checkpoint.store import CheckpointStore
from trainkit.errors import Stopped, UserError

STEPS_PER_EPOCH = 5  # 18 samples in batches of 4, the last of 2
STOPS = pytest.mark.parametrize("stop", [2, 5, 8], ids=["in epoch 0", "at the end of epoch 0", "in epoch 1"])


def with_schedule(make_schedule):
    def configure(task):
        optimizer = sgd(task)
        return optimizer, make_schedule(optimizer)

    return configure


def dropout_task(optimizer=sgd):
    return Regression(optimizer, hidden=8, dropout=0.5)


def both_ways(make_trainer, make_task, make_data, *, stop, callbacks=(), **settings):
    """Return the task of an uninterrupted run of three epochs, and that of one stopped after `stop` and resumed."""
    settings = {"max_duration": "3epoch", **settings}
    whole = make_task()
    make_trainer(**settings).fit(whole, make_data())
    stopped = make_trainer(callbacks=[StopAt(stop)], **settings)
    assert stopped.fit(make_task(), make_data()).steps == stop
    torch.manual_seed(12345)  # what came between must not matter
    random.seed(1)
    np.random.seed(2)
    resumed = make_task()
    trainer = make_trainer(callbacks=list(callbacks), **settings)
    trainer.run_dir = stopped.run_dir
    trainer.fit(resumed, make_data(), resume=stopped.run_dir)
    return whole, resumed


def plain_data(**settings):
    return Data(train=regression_data(18), batch_size=4, **settings)


@STOPS
@pytest.mark.parametrize("optimizer", [sgd, adamw])
@pytest.mark.parametrize("fused", [True, False], ids=["fused", "not fused"])
def test_a_resumed_run_with_dropout_has_the_weights_of_an_uninterrupted_one(make_trainer, optimizer, fused, stop):
    whole, resumed = both_ways(
        make_trainer, lambda: dropout_task(optimizer), plain_data, stop=stop, fused_optimizer=fused
    )
    assert_same_bits(resumed, whole)


@STOPS
def test_a_resumed_run_that_accumulates_has_the_weights_of_an_uninterrupted_one(make_trainer, stop):
    whole, resumed = both_ways(
        make_trainer, dropout_task, plain_data, stop=stop, strategy=SingleStrategy(device="cpu", accumulate=2)
    )
    assert_same_bits(resumed, whole)


def test_a_resumed_run_with_token_weights_has_the_weights_of_an_uninterrupted_one(make_trainer):
    whole, resumed = both_ways(
        make_trainer,
        lambda: WeightedRegression(adamw, hidden=8, dropout=0.5),
        lambda: Data(train=weighted_data(18), batch_size=4),
        stop=7,
        strategy=SingleStrategy(device="cpu", micro_batch_size=3),
    )
    assert_same_bits(resumed, whole)


EVERY_STEP = {
    "StepLR": lambda o: lr_scheduler.StepLR(o, step_size=3, gamma=0.5),
    "MultiStepLR": lambda o: lr_scheduler.MultiStepLR(o, milestones=[3, 9]),
    "LambdaLR": lambda o: lr_scheduler.LambdaLR(o, lambda step: 1 / (1 + step)),
    "CosineAnnealingLR": lambda o: lr_scheduler.CosineAnnealingLR(o, T_max=15),
    "CosineAnnealingWarmRestarts": lambda o: lr_scheduler.CosineAnnealingWarmRestarts(o, T_0=4),
    "OneCycleLR": lambda o: lr_scheduler.OneCycleLR(o, max_lr=0.1, total_steps=16),
    "CyclicLR": lambda o: lr_scheduler.CyclicLR(o, base_lr=0.01, max_lr=0.1, step_size_up=4),
    "PolynomialLR": lambda o: lr_scheduler.PolynomialLR(o, total_iters=15),
    "SequentialLR": lambda o: lr_scheduler.SequentialLR(
        o, [lr_scheduler.LinearLR(o, total_iters=3), lr_scheduler.ExponentialLR(o, 0.9)], milestones=[3]
    ),
    "ChainedScheduler": lambda o: lr_scheduler.ChainedScheduler(
        [lr_scheduler.ConstantLR(o, total_iters=6), lr_scheduler.ExponentialLR(o, 0.9)], optimizer=o
    ),
}


@pytest.mark.parametrize("name", EVERY_STEP)
def test_a_schedule_of_every_step_resumes(make_trainer, name):
    whole, resumed = both_ways(make_trainer, lambda: dropout_task(with_schedule(EVERY_STEP[name])), plain_data, stop=7)
    assert_same_bits(resumed, whole)


@STOPS
def test_a_schedule_of_every_epoch_resumes(make_trainer, stop):
    schedule = with_schedule(lambda o: LRSchedule(lr_scheduler.ExponentialLR(o, 0.5), every="epoch"))
    whole, resumed = both_ways(make_trainer, lambda: dropout_task(schedule), plain_data, stop=stop)
    assert_same_bits(resumed, whole)


@pytest.mark.parametrize("stop", [3, 4, 5, 8])
def test_a_schedule_on_a_metric_resumes(make_trainer, stop):
    plateau = with_schedule(
        lambda o: LRSchedule(
            lr_scheduler.ReduceLROnPlateau(o, factor=0.5, patience=0, threshold=1e9),  # nothing is an improvement
            every="metric",
            metric="validation/loss",
        )
    )
    whole, resumed = both_ways(
        make_trainer,
        lambda: dropout_task(plateau),
        lambda: plain_data(validation=regression_data(6, seed=1)),
        stop=stop,
        evaluate_every="2step",
        num_sanity_batches=2,
    )
    assert_same_bits(resumed, whole)


class Augmented(Dataset):
    """Adds noise from all three generators that people use."""

    def __init__(self, num_samples=18):
        self.inputs, self.targets = regression_data(num_samples).tensors

    def __len__(self):
        return len(self.inputs)

    def __getitem__(self, index):
        noise = torch.randn(4) + random.random() + float(np.random.rand())
        return self.inputs[index] + 0.1 * noise, self.targets[index]


@pytest.mark.slow
@pytest.mark.parametrize(("workers", "stop"), [(0, 2), (0, 7), (1, 2), (2, 7)])
def test_random_augmentation_resumes_with_any_number_of_workers(make_trainer, workers, stop):
    whole, resumed = both_ways(
        make_trainer,
        dropout_task,
        lambda: Data(train=Augmented(), batch_size=4, num_workers=workers),
        stop=stop,
        max_duration="2epoch",
        strategy=SingleStrategy(device="cpu", accumulate=2),
    )
    assert_same_bits(resumed, whole)


def test_the_number_of_workers_does_not_change_the_weights(make_trainer):
    tasks = [dropout_task() for _ in range(2)]
    for task, workers in zip(tasks, (1, 2), strict=True):
        data = Data(train=Augmented(), batch_size=4, num_workers=workers)
        make_trainer(max_duration="2epoch").fit(task, data)
    assert_same_bits(*tasks)


@pytest.mark.parametrize("stop", [2, 7])
@pytest.mark.parametrize(
    "sampler",
    [
        lambda data: WeightedRandomSampler(torch.arange(1.0, 19.0), num_samples=18),
        lambda data: WeightedRandomSampler(torch.arange(1.0, 19.0), num_samples=18, generator=torch.Generator()),
        lambda data: RandomSampler(data, replacement=True, num_samples=18),
    ],
    ids=["weighted", "weighted with a generator", "with replacement"],
)
def test_a_custom_sampler_resumes(make_trainer, sampler, stop):
    def data():
        dataset = regression_data(18)
        return Data(train=DataLoader(dataset, batch_size=4, sampler=sampler(dataset)))

    whole, resumed = both_ways(make_trainer, dropout_task, data, stop=stop)
    assert_same_bits(resumed, whole)


@STOPS
def test_a_pre_batched_dataset_resumes(make_trainer, stop):
    def data():
        batches = zip(*(tensor.split(4) for tensor in regression_data(18).tensors), strict=True)
        return Data(train=[list(batch) for batch in batches])

    whole, resumed = both_ways(make_trainer, dropout_task, data, stop=stop)
    assert_same_bits(resumed, whole)


class Stream(IterableDataset):
    """Shuffles by epoch; with `stateful` it keeps its own position, and counts what it reads."""

    def __init__(self, num_samples=18):
        self.samples = regression_data(num_samples)
        self.epoch, self.position, self.read = 0, 0, 0

    def set_epoch(self, epoch):
        self.epoch, self.position = epoch, 0

    def __iter__(self):
        order = torch.randperm(len(self.samples), generator=torch.Generator().manual_seed(self.epoch))
        while self.position < len(self.samples):
            self.position += 1
            self.read += 1
            yield self.samples[int(order[self.position - 1])]


class StatefulStream(Stream):
    def state_dict(self):
        return {"epoch": self.epoch, "position": self.position}

    def load_state_dict(self, saved):
        self.epoch, self.position = saved["epoch"], saved["position"]


@STOPS
@pytest.mark.parametrize("stream", [Stream, StatefulStream])
def test_an_iterable_dataset_resumes(make_trainer, stream, stop):
    whole, resumed = both_ways(make_trainer, dropout_task, lambda: Data(train=stream(), batch_size=4), stop=stop)
    assert_same_bits(resumed, whole)


@pytest.mark.parametrize("stop", [2, 8], ids=["in epoch 0", "in epoch 1"])
def test_a_stream_that_keeps_its_position_is_not_read_again(make_trainer, stop):
    streams = []

    def data():
        streams.append(StatefulStream())
        return Data(train=streams[-1], batch_size=4)

    both_ways(make_trainer, dropout_task, data, stop=stop)
    trained_before = 4 * stop if stop < STEPS_PER_EPOCH else 18 + 4 * (stop - STEPS_PER_EPOCH)
    assert streams[-1].read == 3 * 18 - trained_before


class DrawingWithoutState(Stream):
    def __iter__(self):
        for sample in super().__iter__():
            yield [value + 0.1 * torch.rand(()) for value in sample]


class Drawing(DrawingWithoutState, StatefulStream):
    pass


@pytest.mark.parametrize("stop", [2, 8], ids=["in epoch 0", "in epoch 1"])
@pytest.mark.parametrize("num_workers", [0, 1])
@pytest.mark.parametrize("stream", [Drawing, DrawingWithoutState])
def test_a_resumed_run_has_the_draws_of_a_stream(make_trainer, caplog, stream, num_workers, stop):
    def data():
        return Data(train=stream(), batch_size=4, num_workers=num_workers)

    whole, resumed = both_ways(make_trainer, dropout_task, data, stop=stop)
    assert_same_bits(resumed, whole)
    assert "reads other data" not in caplog.text


class OrderFromGlobalGenerator(StatefulStream):
    """Draws its order in `set_epoch`."""

    def set_epoch(self, epoch):
        super().set_epoch(epoch)
        self.order = torch.randperm(len(self.samples)).tolist()

    def __iter__(self):
        while self.position < len(self.samples):
            self.position += 1
            yield self.samples[self.order[self.position - 1]]


class OrderOfAnIteration(OrderFromGlobalGenerator):
    """Draws its order when it is iterated."""

    set_epoch = StatefulStream.set_epoch

    def __iter__(self):
        self.order = torch.randperm(len(self.samples)).tolist()
        return super().__iter__()


class ShuffleBuffer(StatefulStream):
    """Endless: replaces one sample of a buffer, which the global generator of Python chooses."""

    def __init__(self):
        super().__init__()
        self.buffer = list(range(6))

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __iter__(self):
        while True:
            place = random.randrange(6)
            number, self.buffer[place] = self.buffer[place], self.position % 18
            self.position += 1
            yield self.samples[number]

    def state_dict(self):
        return {**super().state_dict(), "buffer": list(self.buffer)}

    def load_state_dict(self, saved):
        super().load_state_dict(saved)
        self.buffer = list(saved["buffer"])


@pytest.mark.parametrize("stop", [2, 3, 4])
@pytest.mark.parametrize("num_workers", [0, 1])
@pytest.mark.parametrize("stream", [OrderFromGlobalGenerator, OrderOfAnIteration, ShuffleBuffer])
def test_a_resumed_run_has_the_order_that_a_stream_draws(make_trainer, caplog, stream, num_workers, stop):
    def data():
        return Data(train=stream(), batch_size=4, num_workers=num_workers)

    whole, resumed = both_ways(make_trainer, dropout_task, data, stop=stop, limit_train_batches=3)
    assert_same_bits(resumed, whole)
    assert "reads other data" not in caplog.text


class OrderNotInState(StatefulStream):
    """Draws its order with the first sample of an iteration, and saves a position in it alone."""

    def __iter__(self):
        order = torch.randperm(len(self.samples))
        while self.position < len(self.samples):
            self.position += 1
            yield self.samples[int(order[self.position - 1])]


class SeededByChance(Stream):
    def __iter__(self):
        generator = torch.Generator()
        generator.seed()
        for sample in super().__iter__():
            yield [value + torch.rand((), generator=generator) for value in sample]


@pytest.mark.parametrize("num_workers", [0, 1])
@pytest.mark.parametrize(
    ("stream", "remedy"),
    [(OrderNotInState, "Its state_dict must have"), (SeededByChance, "Seed generators of its own")],
)
def test_a_resumed_stream_that_goes_on_with_another_item_is_warned_of(
    make_trainer, caplog, stream, remedy, num_workers
):
    both_ways(make_trainer, dropout_task, lambda: Data(train=stream(), batch_size=4, num_workers=num_workers), stop=2)
    (warning,) = [text for text in caplog.messages if "reads other data" in text]
    assert "item 8 of epoch 0" in warning and remedy in warning


class Endless(StatefulStream):
    """Goes on in the next epoch where the last one was left."""

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __iter__(self):
        while True:
            self.position += 1
            yield self.samples[self.position % len(self.samples)]


@pytest.mark.parametrize("stop", [2, 3, 4, 6])
def test_a_stream_of_which_a_limit_makes_epochs_resumes(make_trainer, stop):
    def data():
        return Data(train=Endless(), batch_size=4)

    whole, resumed = both_ways(make_trainer, dropout_task, data, stop=stop, limit_train_batches=3)
    assert_same_bits(resumed, whole)


def test_an_iterable_dataset_without_a_position_warns_that_it_is_read_again(make_trainer, caplog):
    both_ways(make_trainer, dropout_task, lambda: Data(train=Stream(), batch_size=4), stop=2)
    assert "first 8 samples are read again" in caplog.text


@pytest.mark.parametrize("settings", [{"limit_train_batches": 3}, {"overfit_batches": 3}])
def test_a_resumed_run_over_part_of_the_data_has_the_weights_of_an_uninterrupted_one(make_trainer, settings):
    whole, resumed = both_ways(make_trainer, dropout_task, plain_data, stop=4, **settings)
    assert_same_bits(resumed, whole)


@pytest.mark.parametrize("precision", ["bf16-mixed", "fp16-mixed", "bf16-true", "fp64"])
def test_a_resumed_run_in_any_precision_has_the_weights_of_an_uninterrupted_one(make_trainer, precision):
    whole, resumed = both_ways(make_trainer, dropout_task, plain_data, stop=7, precision=precision)
    assert_same_bits(resumed, whole)


def test_a_run_stopped_several_times_has_the_weights_of_an_uninterrupted_one(make_trainer):
    whole = dropout_task()
    make_trainer(max_duration="3epoch").fit(whole, plain_data())
    folder, task = None, None
    for stop in (1, 4, 5, 9, 14, 100):
        trainer = make_trainer(max_duration="3epoch", callbacks=[StopAt(stop)])
        trainer.run_dir = folder or trainer.run_dir
        task = dropout_task()
        trainer.fit(task, plain_data(), resume=folder)
        folder = trainer.run_dir
    assert_same_bits(task, whole)


def test_saving_does_not_change_training(make_trainer):
    whole, saving = dropout_task(), dropout_task()
    saves = EachStep(lambda run: run.checkpointer.save(reason="test"))
    make_trainer(max_duration="2epoch").fit(whole, plain_data())
    make_trainer(max_duration="2epoch", callbacks=[saves]).fit(saving, plain_data())
    assert_same_bits(saving, whole)


def test_the_counters_resume(make_trainer):
    def counters(run):
        state = run.state
        return state.step, state.epoch, state.position, state.samples, round(state.epochs, 9)

    whole, first, second = (EachStep(counters) for _ in range(3))
    make_trainer(max_duration="2epoch", callbacks=[whole]).fit(dropout_task(), plain_data())
    trainer = make_trainer(max_duration="2epoch", callbacks=[first, StopAt(7)])
    trainer.fit(dropout_task(), plain_data())
    again = make_trainer(max_duration="2epoch", callbacks=[second], run_dir=trainer.run_dir)
    result = again.fit(dropout_task(), plain_data(), resume=trainer.run_dir)
    assert first.seen + second.seen == whole.seen
    assert whole.seen[:6] == [
        (1, 0, 4, 4, round(4 / 18, 9)),
        (2, 0, 8, 8, round(8 / 18, 9)),
        (3, 0, 12, 12, round(12 / 18, 9)),
        (4, 0, 16, 16, round(16 / 18, 9)),
        (5, 1, 0, 18, 1.0),
        (6, 1, 4, 22, round(1 + 4 / 18, 9)),
    ]
    assert (result.steps, result.samples, result.epochs) == (10, 36, 2.0)


@pytest.mark.parametrize("log_every", ["1step", "4step"])
def test_the_metrics_of_a_resumed_run_are_those_of_an_uninterrupted_one(make_trainer, log_every):
    loggers = [MemoryLogger() for _ in range(3)]
    settings = {"max_duration": "2epoch", "log_every": log_every, "evaluate_every": "2step"}

    def data():
        return plain_data(validation=regression_data(6, seed=1))

    make_trainer(loggers=[loggers[0]], **settings).fit(dropout_task(), data())
    trainer = make_trainer(loggers=[loggers[1]], callbacks=[StopAt(6)], **settings)
    trainer.fit(dropout_task(), data())
    again = make_trainer(loggers=[loggers[2]], run_dir=trainer.run_dir, **settings)
    again.fit(dropout_task(), data(), resume=trainer.run_dir)
    if log_every == "4step":
        assert loggers[1].rows.pop()[0] == 6  # what the first part had not logged when it ended
    assert loggers[1].rows + loggers[2].rows == loggers[0].rows


def test_loggers_are_opened_in_the_same_folder_at_the_step_of_the_resume(make_trainer):
    logger = MemoryLogger()
    trainer = make_trainer(callbacks=[StopAt(3)])
    trainer.fit(Regression(), plain_data())
    again = make_trainer(loggers=[logger], run_dir=None)
    result = again.fit(Regression(), plain_data(), resume=trainer.run_dir)
    assert logger.opened == [(trainer.run_dir, 3)]
    assert result.run_dir == trainer.run_dir


def test_the_state_of_callbacks_resumes(make_trainer):
    class Counter(Callback):
        def __init__(self):
            self.count = 0

        def on_step_end(self, run):
            self.count += 1

        def state_dict(self):
            return {"count": self.count}

        def load_state_dict(self, saved):
            self.count = saved["count"]

    trainer = make_trainer(callbacks=[Counter(), Counter(), StopAt(3)])
    trainer.callbacks[1].count = 100
    trainer.fit(Regression(), plain_data())
    resumed = [Counter(), Counter()]
    make_trainer(callbacks=resumed).fit(Regression(), plain_data(), resume=trainer.run_dir)
    assert [counter.count for counter in resumed] == [5, 105]


def test_seconds_before_a_resume_count(make_trainer):
    trainer = make_trainer(callbacks=[StopAt(3)])
    trainer.fit(Regression(), plain_data())

    class Later(Callback):
        def on_fit_start(self, run):
            self.seconds = run.state.seconds

    later = Later()
    make_trainer(callbacks=[later]).fit(Regression(), plain_data(), resume=trainer.run_dir)
    assert later.seconds > 0


def test_evaluations_of_a_resumed_run_come_at_the_steps_of_an_uninterrupted_one(make_trainer):
    recorder = Recorder()
    settings = {"max_duration": "2epoch", "evaluate_every": "3step"}
    data = plain_data(validation=regression_data(6, seed=1))
    trainer = make_trainer(callbacks=[StopAt(4)], **settings)
    trainer.fit(Regression(), data)
    make_trainer(callbacks=[recorder], num_sanity_batches=2, **settings).fit(Regression(), data, resume=trainer.run_dir)
    assert [(step, stage) for step, stage, _ in recorder.evaluations] == [(6, "validation"), (9, "validation")]
    assert not recorder.steps_of("on_evaluation_start sanity")


@pytest.mark.parametrize("stop", [2, 8], ids=["before the first validation", "after a validation"])
@pytest.mark.parametrize("followed", ["checkpoint", "early stopping", "schedule"])
def test_a_resumed_run_refuses_a_metric_that_is_not_measured_before_its_first_step(make_trainer, stop, followed):
    def task(metric):
        def schedule(optimizer):
            return LRSchedule(lr_scheduler.ReduceLROnPlateau(optimizer), every="metric", metric=metric)

        return Regression(with_schedule(schedule))

    recorder, data = Recorder(), plain_data(validation=regression_data(6, seed=1))
    settings = {"max_duration": "3epoch", "num_sanity_batches": 1}
    trainer = make_trainer(callbacks=[StopAt(stop)], **settings)
    trainer.fit(task("validation/loss"), data)
    follows = {
        "checkpoint": lambda: (task("validation/loss"), [Checkpoint(monitor="validation/los")]),
        "early stopping": lambda: (task("validation/loss"), [EarlyStopping(monitor="validation/los")]),
        "schedule": lambda: (task("validation/los"), []),
    }
    resumed, callbacks = follows[followed]()
    with pytest.raises(UserError, match=r"'validation/los'.*Did you mean 'validation/loss'"):
        make_trainer(callbacks=[recorder, *callbacks], **settings).fit(resumed, data, resume=trainer.run_dir)
    assert recorder.steps_of("on_step_end") == []


def test_an_error_before_the_first_step_of_a_resumed_run_saves_no_checkpoint(make_trainer):
    data, settings = plain_data(validation=regression_data(6, seed=1)), {"max_duration": "3epoch"}
    trainer = make_trainer(callbacks=[StopAt(8)], **settings)
    trainer.fit(Regression(), data)
    before = CheckpointStore(trainer.run_dir / "checkpoints").entries()
    refused = make_trainer(
        callbacks=[Checkpoint(monitor="validation/los")], num_sanity_batches=1, **settings, run_dir=trainer.run_dir
    )
    with pytest.raises(UserError, match="validation/los"):
        refused.fit(Regression(), data, resume=trainer.run_dir)
    assert CheckpointStore(trainer.run_dir / "checkpoints").entries() == before


def test_a_resumed_run_may_follow_a_metric_that_the_task_has_gained(make_trainer):
    class Squared(Regression):
        def validation_step(self, batch):
            loss = super().validation_step(batch)["loss"]
            return {"loss": loss, "squared": loss**2}

    data = plain_data(validation=regression_data(6, seed=1))
    trainer = make_trainer(callbacks=[StopAt(8)], max_duration="3epoch")
    trainer.fit(Regression(), data)
    best = Checkpoint(monitor="validation/squared")
    resumed = make_trainer(callbacks=[best], max_duration="3epoch", num_sanity_batches=1)
    assert "validation/squared" in resumed.fit(Squared(), data, resume=trainer.run_dir).metrics


def test_sanity_batches_are_not_repeated_for_a_metric_that_was_measured_before_the_resume(make_trainer):
    recorder, data = Recorder(), plain_data(validation=regression_data(6, seed=1))
    settings = {"max_duration": "3epoch", "num_sanity_batches": 1}
    trainer = make_trainer(callbacks=[StopAt(8)], **settings)
    trainer.fit(Regression(), data)
    follows = [Checkpoint(monitor="validation/loss"), EarlyStopping(monitor="validation/loss")]
    make_trainer(callbacks=[recorder, *follows], **settings).fit(Regression(), data, resume=trainer.run_dir)
    assert not recorder.steps_of("on_evaluation_start sanity")


def test_a_callback_may_have_a_monitored_of_its_own_that_is_no_name(make_trainer):
    class Watches(Callback):
        def __init__(self):
            self.monitored = ["weights"]

    data = plain_data(validation=regression_data(6, seed=1))
    settings = {"max_duration": "3epoch", "num_sanity_batches": 1}
    trainer = make_trainer(callbacks=[StopAt(8)], **settings)
    trainer.fit(Regression(), data)
    result = make_trainer(callbacks=[Watches()], **settings).fit(Regression(), data, resume=trainer.run_dir)
    assert result.metrics


def test_an_evaluation_that_a_signal_interrupted_is_repeated_after_the_resume(make_trainer):
    class Terminated(Regression):
        def __init__(self, optimizer, *, dies):
            super().__init__(optimizer, hidden=8, dropout=0.5)
            self.dies, self.batches = dies, 0

        def validation_step(self, batch):
            self.batches += 1
            if self.dies and self.batches == 3:  # in the second evaluation
                os.kill(os.getpid(), signal.SIGTERM)
            return super().validation_step(batch)

    plateau = with_schedule(
        lambda o: LRSchedule(
            lr_scheduler.ReduceLROnPlateau(o, factor=0.5, patience=0, threshold=1e9),
            every="metric",
            metric="validation/loss",
        )
    )
    settings = {"max_duration": "2epoch", "evaluate_every": "2step"}
    data = plain_data(validation=regression_data(8, seed=1), evaluation_batch_size=4)
    whole, resumed = Terminated(plateau, dies=False), Terminated(plateau, dies=False)
    make_trainer(**settings).fit(whole, data)
    trainer = make_trainer(callbacks=[SaveAtEnd()], **settings)
    with pytest.raises(Stopped):
        trainer.fit(Terminated(plateau, dies=True), data)
    recorder = Recorder()
    make_trainer(callbacks=[recorder], **settings).fit(resumed, data, resume=trainer.run_dir)
    assert [step for step, _, _ in recorder.evaluations] == [4, 6, 8, 10]
    assert_same_bits(resumed, whole)


@pytest.mark.parametrize("change", [{"batch_size": 8}, {"strategy": SingleStrategy(device="cpu", accumulate=4)}])
def test_on_another_layout_the_remaining_samples_come_once_each_in_the_same_order(make_trainer, change):
    def samples(task):
        return torch.cat([inputs for inputs, _ in task.trained]).tolist()

    whole, stopped, resumed = Seen(), Seen(), Seen()
    make_trainer().fit(whole, plain_data())
    trainer = make_trainer(callbacks=[StopAt(2)])
    trainer.fit(stopped, plain_data())
    data = Data(train=regression_data(18), batch_size=change.get("batch_size", 4))
    make_trainer(change.get("strategy")).fit(resumed, data, resume=trainer.run_dir)
    assert samples(stopped) + samples(resumed) == samples(whole)
    if "strategy" in change:
        assert_close(resumed, whole)


def test_on_another_layout_random_numbers_are_those_of_a_new_seed(make_trainer):
    whole, stopped, resumed = (EachStep(lambda run: torch.rand(()).item()) for _ in range(3))
    make_trainer(callbacks=[whole]).fit(Regression(), plain_data())
    trainer = make_trainer(callbacks=[stopped, StopAt(2)])
    trainer.fit(Regression(), plain_data())
    accumulating = SingleStrategy(device="cpu", accumulate=2)
    make_trainer(accumulating, callbacks=[resumed]).fit(Regression(), plain_data(), resume=trainer.run_dir)
    assert len(resumed.seen) == STEPS_PER_EPOCH - 2
    assert set(whole.seen).isdisjoint(resumed.seen)


@pytest.mark.parametrize("num_samples", [18, 17])
def test_a_resume_warns_if_the_length_of_the_data_has_changed(make_trainer, caplog, num_samples):
    trainer = make_trainer(callbacks=[StopAt(6)], max_duration="2epoch")
    trainer.fit(Regression(), Data(train=regression_data(18), batch_size=4))
    data = Data(train=regression_data(num_samples), batch_size=4)
    make_trainer(max_duration="2epoch").fit(Regression(), data, resume=trainer.run_dir)
    warned = "the training data has 17 samples, but had 18 when"
    assert (warned in caplog.text) == (num_samples == 17)
    assert ("steps of epoch 1 may follow another order" in caplog.text) == (num_samples == 17)


def test_a_run_is_resumed_from_its_folder_its_checkpoints_folder_or_a_file(make_trainer):
    trainer = make_trainer(callbacks=[StopAt(3)])
    trainer.fit(Regression(), plain_data())
    (file,) = (trainer.run_dir / "checkpoints").glob("*.pt")
    for path in (trainer.run_dir, trainer.run_dir / "checkpoints", file, str(file)):
        recorder = Recorder()
        make_trainer(callbacks=[recorder]).fit(Regression(), plain_data(), resume=path)
        assert recorder.moments[0] == ("on_fit_start", 3)


def test_a_run_that_has_reached_its_duration_is_resumed_without_a_step(make_trainer):
    trainer = make_trainer(callbacks=[StopAt(5)])
    trainer.fit(Regression(), plain_data())
    task, recorder = Regression(init_seed=9), Recorder()
    result = make_trainer(callbacks=[recorder]).fit(task, plain_data(), resume=trainer.run_dir)
    assert result.steps == 5
    assert not recorder.steps_of("on_step_end")


def test_a_longer_duration_continues_a_finished_run(make_trainer):
    whole, resumed = dropout_task(), dropout_task()
    make_trainer(max_duration="2epoch").fit(whole, plain_data())
    trainer = make_trainer(max_duration="1epoch", callbacks=[SaveAtEnd()])
    trainer.fit(dropout_task(), plain_data())
    make_trainer(max_duration="2epoch").fit(resumed, plain_data(), resume=trainer.run_dir)
    assert_same_bits(resumed, whole)


# ---- What cannot be resumed


@pytest.fixture
def stopped_run(make_trainer):
    """The folder of a run with SGD that was stopped in mid-epoch after three of five steps."""
    trainer = make_trainer(callbacks=[StopAt(3)], max_duration="2epoch")
    trainer.fit(Regression(sgd), plain_data())
    return trainer.run_dir


def test_resuming_another_task_lists_the_keys(make_trainer, stopped_run):
    with pytest.raises(UserError, match=r"(?s)belongs to another task.*missing: .*network\.3\.weight"):
        make_trainer().fit(Regression(sgd, hidden=3), plain_data(), resume=stopped_run)


def test_resuming_a_task_of_other_shapes_lists_the_shapes(make_trainer, stopped_run):
    class Wide(Regression):
        def __init__(self):
            super().__init__(sgd)
            self.network[0] = torch.nn.Linear(7, 1)

    with pytest.raises(UserError, match=r"network\.0\.weight: \(1, 4\) saved, \(1, 7\) expected"):
        make_trainer().fit(Wide(), plain_data(), resume=stopped_run)


def test_resuming_a_missing_checkpoint_names_the_existing_ones(make_trainer, stopped_run):
    near = stopped_run.with_name(stopped_run.name + "x")
    with pytest.raises(UserError, match=f"no run or checkpoint at .*Did you mean '{stopped_run.name}'"):
        make_trainer().fit(Regression(), plain_data(), resume=near)


@pytest.mark.parametrize(
    "optimizer",
    [
        adamw,
        lambda task: torch.optim.SGD([{"params": [p]} for p in task.parameters()], lr=0.1),
        with_schedule(EVERY_STEP["StepLR"]),
    ],
    ids=["another kind", "other groups", "a schedule more"],
)
def test_resuming_with_another_optimizer_or_schedule_is_rejected(make_trainer, stopped_run, optimizer):
    task = Regression(optimizer)
    with pytest.raises(UserError, match=r"(optimizer|schedule).*configure_optimizers"):
        make_trainer(max_duration="2epoch").fit(task, plain_data(), resume=stopped_run)


@pytest.mark.parametrize("settings", [{"limit_train_batches": 1}, {"limit_train_batches": 3}])
def test_resuming_beyond_the_end_of_a_shorter_epoch_ends(make_trainer, stopped_run, settings):
    trainer = make_trainer(max_duration="9epoch", **settings)
    with pytest.raises(UserError, match=r"position 12 .*Resume with"):
        trainer.fit(Regression(sgd), plain_data(), resume=stopped_run)


@pytest.mark.parametrize("policy", ["raise", "skip"])
def test_a_run_saved_without_fused_kernels_is_resumed_with_them(make_trainer, policy):
    trainer = make_trainer(callbacks=[StopAt(3)], max_duration="2epoch", fused_optimizer=False)
    trainer.fit(Regression(adamw), plain_data())
    task = Regression(adamw)
    again = make_trainer(max_duration="2epoch", on_nonfinite=policy)
    assert again.fit(task, plain_data(), resume=trainer.run_dir).steps == 10


@pytest.mark.parametrize("optimizer", [sgd, adamw])
def test_a_run_saved_by_a_torch_whose_optimizer_had_a_setting_less_is_resumed(make_trainer, tmp_path, optimizer):
    trainer = make_trainer(callbacks=[StopAt(3)], max_duration="2epoch")
    trainer.fit(Regression(optimizer), plain_data())
    payload = CheckpointStore(trainer.run_dir / "checkpoints").load_last().payload
    for group in payload["optimizer"]["param_groups"]:
        del group["differentiable"]  # torch fills in the default of a setting that came later
    del payload["settings"]["param_groups[0].differentiable"]
    CheckpointStore(tmp_path / "older" / "checkpoints").save(payload, name="step_3", step=3, epoch=0)
    again = make_trainer(max_duration="2epoch")
    assert again.fit(Regression(optimizer), plain_data(), resume=tmp_path / "older").steps == 10
