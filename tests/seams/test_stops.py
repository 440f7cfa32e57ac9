"""A stop that a callback requests comes after the same step under every strategy."""

import pytest
from trainkit.callbacks.early_stopping import EarlyStopping

from tests.seams.training import BATCH_SIZE, BOUND, Layers, batches, difference, samples, trained
from trainkit import Callback, Data

MANY = 40  # steps, so that a late stop shows


class StopOnOneRank(Callback):
    """Requests a stop on the last rank alone, in one hook at one step."""

    def __init__(self, hook, step):
        self.step = step
        setattr(self, hook, self.ask)

    def ask(self, run, *arguments):
        is_last = run.strategy.comm.process == run.strategy.comm.num_processes - 1
        if run.state.step == self.step and is_last:
            run.request_stop("asked")


class StopLate(EarlyStopping):
    """Stops after the second evaluation, without an improvement."""

    def __init__(self):
        super().__init__(patience=1, min_delta=1e6)


def data(**settings):
    return Data(train=samples(BATCH_SIZE * MANY), batch_size=BATCH_SIZE, shuffle=False, **settings)


def plain_loop(steps):
    task = Layers()
    optimizer = task.configure_optimizers()
    for _, batch in zip(range(steps), batches(BATCH_SIZE * MANY), strict=False):
        task.training_step(batch).backward()
        optimizer.step()
        optimizer.zero_grad()
    return task.state_dict()


@pytest.fixture(autouse=True)
def _in_a_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize(
    ("strategy", "hook", "step"),
    [
        ("single", "on_step_end", 5),
        ("ddp", "on_step_end", 5),
        ("pipeline", "on_step_end", 5),
        ("ddp", "on_log", 4),
        ("ddp", "on_fit_start", 0),
    ],
)
def test_training_ends_after_the_step_in_which_one_rank_requests_it(strategy, hook, step):
    weights = trained(strategy, Layers(), StopOnOneRank(hook, step), data=data(), log_every="2step")
    assert difference(weights, plain_loop(step)) < BOUND


@pytest.mark.parametrize("strategy", ["fsdp", "pipeline"])
def test_early_stopping_ends_training_after_the_evaluation_that_decides(strategy):
    evaluated = data(validation=samples(BATCH_SIZE))
    weights = trained(strategy, Layers(), StopLate(), data=evaluated, evaluate_every="4step")
    assert difference(weights, plain_loop(8)) < BOUND


def test_runs_with_our_callbacks_alone_agree_on_no_stop_in_every_step(monkeypatch):
    from trainkit.run import Run

    emit, asked = Run.emit, []

    def counted(run, hook, *arguments, start=0):
        run.may_be_stopped = False
        emit(run, hook, *arguments, start=start)
        asked.extend([hook] if run.may_be_stopped else [])

    monkeypatch.setattr(Run, "emit", counted)
    ours = ["checkpoint", "ema", "garbage_collection", "gradual_unfreezing", "histograms", "profiler", "speed_monitor"]
    trained("single", Layers(), *ours, data=data(validation=samples(8)), evaluate_every="20step", log_every="1step")
    assert set(asked) == {"on_evaluation_end"}
