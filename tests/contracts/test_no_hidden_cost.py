"""Between log points nothing waits for the device, unused moments cost nothing, and calls are shallow (C7)."""

import inspect
from collections import Counter
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import trainkit.strategies
from torch import Tensor
from trainkit.strategies.single import SingleStrategy

import trainkit
from tests.marks import on_gpu
from tests.tasks import Recorder, Regression, WeightedRegression, regression_data, weighted_data
from trainkit import Callback, Data
from trainkit.callback import HOOKS
from trainkit.distributed.collectives import Collectives, ProcessGroupCollectives
from trainkit.loops.fit_loop import FitLoop
from trainkit.metrics.accumulate import WeightedMeans
from trainkit.metrics.step_output import StepOutput
from trainkit.optim.optimizer import _if_on_host
from trainkit.testing import run_ranks

WAITING = ("item", "tolist", "numpy", "__bool__", "__float__", "__int__", "__index__", "cpu", "nonzero", "is_nonzero")
TRAINKIT = [str(Path(path)) for path in (*trainkit.__path__, *trainkit.strategies.__path__)]


class CountWaits(Callback):
    """Counts, step by step, the calls that make the host wait for the device; only steps without a log point count."""

    def __init__(self, monkeypatch, log_points):
        self.calls = Counter()
        self._log_points = log_points
        self._training = False
        self._step = 0
        for name in WAITING:
            monkeypatch.setattr(Tensor, name, self._counting(name, getattr(Tensor, name)))

    def _counting(self, name, original):
        def method(tensor, *args, **kwargs):
            # Indices of samples are made on the host and never were on the device.
            if self._training and self._step + 1 not in self._log_points and tensor.dtype != torch.int64:
                self.calls[name, self._step + 1] += 1
            return original(tensor, *args, **kwargs)

        return method

    def on_fit_start(self, run):
        self._training = True

    def on_step_complete(self, run):
        self._step = run.state.step

    def on_fit_end(self, run):
        self._training = False


@pytest.mark.parametrize(
    ("settings", "task", "data"),
    [
        ({}, Regression, regression_data),
        ({"strategy": SingleStrategy(device="cpu", accumulate=4)}, Regression, regression_data),
        ({"strategy": SingleStrategy(device="cpu", accumulate=4)}, WeightedRegression, weighted_data),
        ({"max_grad_norm": 0.1}, Regression, regression_data),
        ({"max_grad_value": 0.1}, Regression, regression_data),
        ({"precision": "bf16-mixed"}, Regression, regression_data),
        ({"precision": "bf16-true"}, Regression, regression_data),
        ({"on_nonfinite": "skip"}, Regression, regression_data),
        ({"on_nonfinite": "stop"}, Regression, regression_data),
        ({"strategy": SingleStrategy(device="cpu", micro_batch_size="auto")}, Regression, regression_data),
    ],
    ids=lambda value: "",
)
def test_nothing_waits_for_the_device_between_log_points(make_trainer, monkeypatch, settings, task, data):
    # What lies in the host's memory may be read at once; here it stands for what lies in a device's.
    monkeypatch.setattr("trainkit.optim.optimizer._if_on_host", lambda flag: None)
    waits = CountWaits(monkeypatch, log_points={5, 10, 13})  # after the last step comes the last log
    trainer = make_trainer(log_every="5step", max_duration="2epoch", callbacks=[waits], **settings)
    trainer.fit(task(), Data(train=data(48), batch_size=8))
    assert waits.calls == {}


def test_only_what_lies_in_the_hosts_memory_is_read_at_once():
    assert [_if_on_host(torch.tensor(flag)) for flag in (True, False)] == [True, False]
    assert _if_on_host(torch.empty((), dtype=torch.bool, device="meta")) is None


def test_the_counting_of_waits_sees_a_task_that_waits(make_trainer, monkeypatch):
    class Waiting(Regression):
        def training_step(self, batch):
            loss = super().training_step(batch)
            assert loss.item() >= 0
            return loss

    waits = CountWaits(monkeypatch, log_points={5, 7})
    make_trainer(log_every="5step", callbacks=[waits]).fit(Waiting(), Data(train=regression_data(48), batch_size=8))
    assert waits.calls == {("item", step): 1 for step in (1, 2, 3, 4, 6)}


@on_gpu
@pytest.mark.parametrize(
    "settings", [{}, {"max_grad_norm": 0.1}, {"precision": "bf16-mixed"}, {"on_nonfinite": "skip"}]
)
def test_nothing_waits_for_a_gpu_between_log_points(make_trainer, settings):
    class Strict(Callback):
        def on_step_end(self, run):
            # The log points are steps 4, 8 and the last; the first step warms up.
            torch.cuda.set_sync_debug_mode("default" if run.state.step in (4, 8, 11) else "error")

        def on_log(self, run, metrics):
            torch.cuda.set_sync_debug_mode("error")

        def on_fit_end(self, run):
            torch.cuda.set_sync_debug_mode("default")

        def close(self):
            torch.cuda.set_sync_debug_mode("default")

    strategy = SingleStrategy(device="cuda", accumulate=2)
    trainer = make_trainer(strategy, log_every="4step", max_duration="11step", callbacks=[Strict()], **settings)
    task = WeightedRegression(lambda task: torch.optim.AdamW(task.parameters()), hidden=8)
    assert trainer.fit(task, Data(train=weighted_data(64), batch_size=8)).steps == 11


def test_from_fit_to_training_step_there_are_at_most_five_frames_of_trainkit(make_trainer):
    frames = []

    class Looking(Regression):
        def training_step(self, batch):
            if not frames:
                frames.extend(f"{Path(f.filename).name}:{f.function}" for f in inspect.stack() if _is_ours(f.filename))
            return super().training_step(batch)

    make_trainer().fit(Looking(), Data(train=regression_data(8), batch_size=4))
    assert frames[-1] == "trainer.py:fit"
    assert len(frames) <= 5, frames


def _is_ours(filename):
    return any(filename.startswith(folder) for folder in TRAINKIT)


def test_hooks_that_nobody_overrides_are_not_called(make_trainer, monkeypatch):
    class Nothing(Callback):
        pass

    called = []
    for hook in HOOKS:
        # Each function needs the name of its own hook, so it is an argument with a default.
        monkeypatch.setattr(Callback, hook, lambda *args, hook=hook: called.append(hook))
    trainer = make_trainer(callbacks=[Nothing()], log_every="1step")
    trainer.fit(Regression(), Data(train=regression_data(8), validation=regression_data(4), batch_size=4))
    assert called == []


def test_a_hook_set_on_one_callback_object_is_called(make_trainer):
    callback, steps = Callback(), []
    callback.on_step_end = lambda run: steps.append(run.state.step)
    make_trainer(callbacks=[callback]).fit(Regression(), Data(train=regression_data(8), batch_size=4))
    assert steps == [1, 2]


def test_metrics_are_reduced_once_for_each_log_interval_and_evaluation_and_once_at_the_end(make_trainer):
    class Counting(Collectives):
        reductions = gathers = 0

        def all_reduce_metrics(self, *args, **kwargs):
            self.reductions += 1
            return super().all_reduce_metrics(*args, **kwargs)

        def all_gather_object(self, value):
            self.gathers += 1
            return super().all_gather_object(value)

    strategy = SingleStrategy(device="cpu")
    strategy.comm = Counting()
    trainer = make_trainer(strategy, log_every="5step", evaluate_every="1epoch", max_duration="2epoch")
    trainer.fit(Regression(), Data(train=regression_data(40), validation=regression_data(12), batch_size=4))
    assert strategy.comm.reductions == 4 + 1 + 2  # log intervals, the rest at the end, evaluations
    assert strategy.comm.gathers == 1  # at the start: which hooks may request a stop


class CountCollectives(ProcessGroupCollectives):
    count = 0

    def reduce_in_place(self, tensor, op="sum", *, where):
        self.count += 1
        return super().reduce_in_place(tensor, op, where=where)

    def all_gather_object(self, value):
        self.count += 1
        return super().all_gather_object(value)


def collectives_of_three_logs():
    device, counts = torch.device("cpu"), []
    comm = CountCollectives(dist.group.WORLD, device=device, timeout_seconds=60.0, step=lambda: 0)
    for _ in range(3):
        means = WeightedMeans(device)
        means.add([StepOutput(torch.tensor(1.0), 1, {f"of_rank_{comm.rank}": 2.0})])
        before = comm.count
        assert means.reduce(comm) == {"loss": 1.0, "of_rank_0": 2.0, "of_rank_1": 2.0}
        counts.append(comm.count - before)
    return counts


def test_ranks_that_know_the_names_of_all_metrics_reduce_them_in_one_collective():
    assert run_ranks(collectives_of_three_logs, 2) == [[3, 1, 1]] * 2


def test_the_outputs_kept_between_log_points_are_bounded(make_trainer, monkeypatch):
    monkeypatch.setattr("trainkit.metrics.accumulate._FOLD_AT", 8)
    kept = []

    class Watching(WeightedMeans):
        def add(self, outputs, *, step=0):
            super().add(outputs, step=step)
            kept.append(len(self._outputs))

    monkeypatch.setattr("trainkit.loops.rollback.WeightedMeans", Watching)
    recorder = Recorder()
    trainer = make_trainer(log_every="1epoch", callbacks=[recorder])
    task = Regression(lambda task: torch.optim.SGD(task.parameters(), lr=0.0))
    trainer.fit(task, Data(train=regression_data(100), batch_size=4))
    assert max(kept) < 8
    inputs, targets = regression_data(100).tensors
    expected = (task(inputs) - targets).square().mean().item()
    assert recorder.logged[0]["train/loss"] == pytest.approx(expected, rel=1e-6)


def test_graphs_do_not_outlive_their_step(make_trainer):
    class Holding(Regression):
        def training_step(self, batch):
            loss = super().training_step(batch)
            return {"loss": loss, "double": loss * 2, "weight": loss.new_tensor(4.0) + 0 * loss}

    class Keeping(SingleStrategy):
        def forward_backward(self, task, step_batch):
            outputs = super().forward_backward(task, step_batch)
            kept.extend(outputs)
            return outputs

    kept = []
    make_trainer(Keeping(device="cpu", accumulate=2)).fit(Holding(), Data(train=regression_data(8), batch_size=4))
    assert len(kept) == 4
    for output in kept:
        assert not output.loss.requires_grad
        assert not output.metrics["double"].requires_grad
        assert not output.weight.requires_grad


def test_the_loop_reads_a_batch_only_when_it_is_needed(make_trainer):
    class Lazy(torch.utils.data.Dataset):
        read = 0

        def __len__(self):
            return 10**6

        def __getitem__(self, index):
            self.read += 1
            return torch.ones(4), torch.ones(1)

    dataset = Lazy()
    make_trainer(max_duration="2step").fit(Regression(), Data(train=dataset, batch_size=4, shuffle=False))
    assert dataset.read == 8


def test_the_loop_itself_is_readable_on_one_screen():
    assert len(inspect.getsource(FitLoop.run).splitlines()) <= 45
