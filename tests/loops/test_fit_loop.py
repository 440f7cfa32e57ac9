"""The control flow of training: which moments come when, and what happens after an error."""

import logging
import signal

import pytest
import torch
from torch.utils.data import DataLoader, DistributedSampler

from tests.tasks import (
    EachStep,
    MemoryLogger,
    Recorder,
    Regression,
    SaveAtEnd,
    StopAt,
    assert_same_bits,
    on_cpu,
    regression_data,
)
from trainkit import Callback, Data, Stopped, TaskModule, UserError


def data(**settings):
    return Data(train=regression_data(12), batch_size=4, **settings)


VALIDATION = regression_data(4, seed=1)


def test_moments_come_in_their_order(make_trainer):
    class Saving(Callback):
        def on_step_complete(self, run):
            if run.state.step in (2, 3):
                run.checkpointer.save(reason="test")

    recorder = Recorder()
    trainer = make_trainer(
        callbacks=[recorder, Saving()],
        log_every="2step",
        evaluate_every="1epoch",
        max_duration="4step",
        num_sanity_batches=1,
    )
    trainer.fit(Regression(), data(validation=VALIDATION))
    assert recorder.moments == [
        ("on_evaluation_start sanity", 0),
        ("on_evaluation_end sanity", 0),
        ("on_fit_start", 0),
        ("on_epoch_start", 0),
        ("on_step_end", 1),
        ("on_step_end", 2),
        ("on_log", 2),
        ("on_save", 2),
        ("on_step_end", 3),
        ("on_evaluation_start validation", 3),
        ("on_evaluation_end validation", 3),
        ("on_epoch_end", 3),
        ("on_save", 3),
        ("on_epoch_start", 3),
        ("on_step_end", 4),
        ("on_log", 4),
        ("on_fit_end", 4),
        ("close", 4),
    ]


@pytest.mark.parametrize("stage", ["validate", "test", "predict"])
def test_an_evaluation_alone_calls_its_hooks(make_trainer, stage):
    name = "validation" if stage == "validate" else stage
    recorder = Recorder()
    getattr(make_trainer(callbacks=[recorder]), stage)(Regression(), Data(**{name: VALIDATION}, batch_size=4))
    assert [moment for moment, _ in recorder.moments] == [
        f"on_evaluation_start {name}",
        f"on_evaluation_end {name}",
        "close",
    ]


def test_callbacks_are_called_in_the_order_in_which_they_were_given(make_trainer):
    called = []
    callbacks = [EachStep(lambda run, name=name: called.append(name)) for name in "ba"]
    make_trainer(callbacks=callbacks, max_duration="2step").fit(Regression(), data())
    assert called == ["b", "a", "b", "a"]


def test_metrics_that_a_callback_adds_are_written(make_trainer):
    class Adds(Callback):
        def on_log(self, run, metrics):
            metrics["mine/step"] = float(run.state.step)

    logger = MemoryLogger()
    result = make_trainer(callbacks=[Adds()], loggers=[logger], log_every="3step").fit(Regression(), data())
    assert logger.rows[0][1]["mine/step"] == 3.0
    assert result.metrics["mine/step"] == 3.0


def test_a_stop_that_is_asked_for_comes_after_the_step_with_its_reason(make_trainer):
    recorder = Recorder()
    result = make_trainer(callbacks=[StopAt(2), recorder], max_duration="9epoch").fit(Regression(), data())
    assert (result.steps, result.exit_reason) == (2, "test")
    assert recorder.moments[-2:] == [("on_fit_end", 2), ("close", 2)]


def test_the_first_reason_to_stop_is_the_one_that_is_kept(make_trainer):
    class Twice(Callback):
        def on_step_end(self, run):
            run.request_stop("first")
            run.request_stop("second")

    assert make_trainer(callbacks=[Twice()]).fit(Regression(), data()).exit_reason == "first"


def test_a_stop_before_the_first_step_trains_nothing(make_trainer):
    class Never(Callback):
        def on_fit_start(self, run):
            run.request_stop("no")

    recorder = Recorder()
    result = make_trainer(callbacks=[Never(), recorder]).fit(Regression(), data())
    assert (result.steps, result.exit_reason) == (0, "no")
    assert recorder.steps_of("on_epoch_start") == []


def test_a_stop_at_an_epochs_end_does_not_begin_another(make_trainer):
    recorder = Recorder()
    make_trainer(callbacks=[StopAt(3), recorder], max_duration="9epoch").fit(Regression(), data())
    assert recorder.steps_of("on_epoch_start") == [0]
    assert recorder.steps_of("on_epoch_end") == [3]


def test_the_task_trains_in_training_mode_again_after_each_evaluation(make_trainer):
    class Modes(Callback):
        def __init__(self):
            self.modes = []

        def on_step_end(self, run):
            self.modes.append(run.task.training)

        def on_evaluation_start(self, run, stage):
            assert run.evaluation.stage == stage

    modes = Modes()
    trainer = make_trainer(callbacks=[modes], evaluate_every="1step", num_sanity_batches=1)
    trainer.fit(Regression().eval(), data(validation=VALIDATION))
    assert modes.modes == [True] * 3


def test_an_evaluation_reports_its_progress(make_trainer):
    class Progress(Regression):
        def validation_step(self, batch):
            progress = recorder.run.evaluation
            seen.append((progress.stage, progress.batch, progress.num_batches))
            return super().validation_step(batch)

    recorder, seen = Recorder(), []
    make_trainer(callbacks=[recorder]).fit(Progress(), data(validation=regression_data(10, seed=1)))
    assert seen == [("validation", 0, 3), ("validation", 1, 3), ("validation", 2, 3)]
    assert recorder.run.evaluation is None


# ---- Errors


class Broken(Regression):
    def __init__(self, at):
        super().__init__()
        self.at, self.calls = at, 0

    def training_step(self, batch):
        self.calls += 1
        if self.calls == self.at:
            raise KeyError("first")
        return super().training_step(batch)


def test_after_an_error_in_a_step_on_exception_is_called_and_everything_is_closed(make_trainer):
    recorder, logger = Recorder(), MemoryLogger()
    trainer = make_trainer(callbacks=[recorder], loggers=[logger])
    with pytest.raises(KeyError, match="first"):
        trainer.fit(Broken(2), data())
    assert recorder.moments[-2:] == [("on_exception KeyError", 1), ("close", 1)]
    assert logger.closed == 1


@pytest.mark.parametrize("moment", ["on_fit_start", "on_epoch_start", "on_step_end", "on_log", "on_save", "on_fit_end"])
def test_after_an_error_in_a_callback_everything_is_closed(make_trainer, moment):
    def fail(*args):
        raise KeyError("first")

    recorder, logger, failing = Recorder(), MemoryLogger(), Callback()
    setattr(failing, moment, fail)
    trainer = make_trainer(callbacks=[failing, StopAt(2), recorder], loggers=[logger], log_every="1step")
    with pytest.raises(KeyError, match="first"):
        trainer.fit(Regression(), data())
    assert [name for name, _ in recorder.moments[-2:]] == ["on_exception KeyError", "close"]
    assert logger.closed == 1


def test_an_error_in_validation_ends_the_evaluation_and_keeps_gradients_enabled(make_trainer):
    class BrokenValidation(Regression):
        def validation_step(self, batch):
            raise KeyError("first")

    recorder = Recorder()
    with pytest.raises(KeyError):
        make_trainer(callbacks=[recorder]).fit(BrokenValidation(), data(validation=VALIDATION))
    assert recorder.moments[-2:] == [("on_exception KeyError", 3), ("close", 3)]
    assert recorder.run.evaluation is None
    assert torch.is_grad_enabled()


def test_the_error_of_training_is_not_hidden_by_later_ones(make_trainer, caplog):
    class Worse(Callback):
        def on_exception(self, run, error):
            raise RuntimeError("second")

        def close(self):
            raise RuntimeError("third")

    recorder = Recorder()
    with pytest.raises(KeyError, match="first"):
        make_trainer(callbacks=[Worse(), recorder]).fit(Broken(1), data())
    assert [name for name, _ in recorder.moments[-2:]] == ["on_exception KeyError", "close"]
    assert "second" in caplog.text


def test_an_error_while_closing_is_raised_after_all_else_is_closed(make_trainer):
    class Worse(Callback):
        def close(self):
            raise RuntimeError("cannot close")

    recorder, logger = Recorder(), MemoryLogger()
    with pytest.raises(RuntimeError, match="cannot close"):
        make_trainer(callbacks=[Worse(), recorder], loggers=[logger]).fit(Regression(), data())
    assert recorder.moments[-1] == ("close", 3)
    assert logger.closed == 1


def test_after_an_error_the_task_can_be_trained_again_with_the_same_result(make_trainer):
    strategy = on_cpu("single", accumulate=2)
    task, expected = Broken(2), Regression()  # between the micro-batches of the first step
    with pytest.raises(KeyError):
        make_trainer(strategy).fit(task, data())
    for each in (task, expected):
        make_trainer(strategy).fit(each, data())
    assert_same_bits(task, expected)


def test_an_error_while_the_run_is_prepared_calls_on_exception(make_trainer):
    class NoOptimizer(Regression):
        def configure_optimizers(self):
            raise KeyError("first")

    recorder = Recorder()
    with pytest.raises(KeyError):
        make_trainer(callbacks=[recorder]).fit(NoOptimizer(), data())
    assert [name for name, _ in recorder.moments] == ["on_exception KeyError", "close"]


@pytest.mark.parametrize("seed", [0, 7])
def test_the_seed_of_a_sampler_that_is_replaced_is_named_where_the_order_has_another(make_trainer, caplog, seed):
    dataset = regression_data(8)
    sampler = DistributedSampler(dataset, num_replicas=2, rank=0, seed=seed)
    make_trainer(seed=0).fit(Regression(), DataLoader(dataset, batch_size=4, sampler=sampler))
    assert ("has seed=7, but samples come in the order of seed=0" in caplog.text) == (seed == 7)


def test_a_signal_in_the_evaluation_after_the_last_step_decides_how_the_run_ends(make_trainer):
    class Stopping(Regression):
        def validation_step(self, batch):
            signal.raise_signal(signal.SIGTERM)
            return super().validation_step(batch)

    with pytest.raises(Stopped) as stopped:
        make_trainer(max_duration="2step", evaluate_every="2step").fit(Stopping(), data(validation=VALIDATION))
    assert stopped.value.signal_name == "SIGTERM" and stopped.value.code == 128 + signal.SIGTERM


def test_an_attribute_of_a_dataset_that_is_called_order_is_its_own_affair(make_trainer):
    dataset = regression_data(12)
    dataset.order = [2, 1, 0]
    make_trainer(max_duration="1step").fit(Regression(), Data(train=dataset, batch_size=4))


def test_nothing_is_logged_when_nothing_happens(make_trainer, caplog):
    with caplog.at_level(logging.INFO, logger="trainkit"):
        make_trainer(callbacks=[SaveAtEnd()]).fit(Regression(), data(validation=VALIDATION))
    assert [record for record in caplog.records if record.levelno >= logging.WARNING] == []


def test_the_library_prints_nothing(make_trainer, capsys):
    make_trainer().fit(Regression(), data(validation=VALIDATION))
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize(
    ("step", "stage"), [("validation_step", "validation"), ("test_step", "test"), ("predict_step", "predict")]
)
def test_a_step_that_is_missing_is_named_with_what_to_define(make_trainer, step, stage):
    call = {"validation": "validate"}.get(stage, stage)
    expected = {"validation_step": "validation_step", "test_step": "validation_step", "predict_step": "forward"}[step]
    with pytest.raises((UserError, NotImplementedError), match=expected):
        getattr(make_trainer(), call)(TaskModule(), Data(**{stage: VALIDATION}, batch_size=4))


class Grown(Callback):
    """Adds a layer, or replaces a parameter, after the first step."""

    def __init__(self, how):
        self.how = how

    def on_step_end(self, run):
        network = run.task.network[0]
        if run.state.step != 1:
            return
        if self.how == "add":
            network.extra = torch.nn.Linear(2, 2)
        elif self.how == "freeze":
            network.extra = torch.nn.Linear(2, 2).requires_grad_(False)
        else:
            network.weight = torch.nn.Parameter(network.weight.detach().clone())
        if self.how == "optimize":
            run.phase_optimizer.optimizer.add_param_group({"params": [network.weight]})


GROWN = {
    **{name: {} for name in ("single", "dp")},
    **{name: {"devices": 2} for name in ("ddp", "torch_ddp", "fusion", "fsdp")},
    "pipeline": {"stages": 2},
}


@pytest.mark.parametrize("strategy", GROWN)
@pytest.mark.parametrize(("how", "name"), [("add", "network.0.extra.weight"), ("replace", "network.0.weight")])
def test_a_trained_parameter_added_while_training_is_refused_by_name(make_trainer, strategy, how, name):
    message = f"the parameter {name} was added or replaced while training"
    if how == "replace" and strategy == "pipeline":  # whose other stage cannot read it to begin with
        message = f"run.task.{name} is on stage 0, and this is stage 1"
    elif how == "replace" and strategy == "fsdp":
        message = f"{name} is used as a whole, where each rank has a shard of it"
    with pytest.raises(UserError, match=message):
        make_trainer(on_cpu(strategy, **GROWN[strategy]), callbacks=[Grown(how)]).fit(Regression(), data())


@pytest.mark.parametrize("how", ["freeze", "optimize"])
def test_an_added_parameter_that_is_frozen_or_optimized_is_accepted_on_one_process(make_trainer, how):
    assert make_trainer(callbacks=[Grown(how)], max_duration="3step").fit(Regression(), data()).steps == 3


def test_no_registration_hook_remains_after_a_fit(make_trainer):
    from torch.nn.modules import module

    make_trainer(max_duration="2step").fit(Regression(), Data(train=regression_data(8), batch_size=4))
    assert not module._global_parameter_registration_hooks
    assert not module._global_module_registration_hooks
