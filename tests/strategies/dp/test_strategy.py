"""The `dp` strategy: replicas on several devices of one process train to the weights of one device."""

from __future__ import annotations

import logging
import random
import threading

import pytest
import torch
from torch import nn
from trainkit.strategies.dp.replicate import replicate, scatter
from trainkit.strategies.dp.strategy import DataParallelStrategy
from trainkit.strategies.single import SingleStrategy

from tests.equality import TASKS, ConvNet, Perceptron, StepWeights, images, largest_difference, make, numbers
from tests.marks import on_gpu
from tests.tasks import (
    Recorder,
    Regression,
    SaveAtEnd,
    StopAt,
    assert_close,
    assert_same_bits,
    regression_data,
    weights,
)
from trainkit import Callback, Data, TaskModule, Trainer, UserError

TOLERANCE = {"fp32": 1e-6, "fp64": 1e-12}


def dp(count: int, **settings) -> DataParallelStrategy:
    return DataParallelStrategy(devices=["cpu"] * count, **settings)


def nothing(name):
    return torch.no_grad()  # a context without effect on the test


@pytest.fixture
def trained(make_trainer):
    """A function that trains and returns the task and its weights after every step."""

    def train(strategy, task, data, **settings):
        seen = StepWeights()
        trainer = make_trainer(strategy, callbacks=[seen], **{"max_duration": "2epoch", **settings})
        trainer.fit(task, data)
        return task, seen.steps

    return train


# ---- Weights


@pytest.mark.parametrize("precision", ["fp32", "fp64"])
@pytest.mark.parametrize("num_devices", [2, 3])
@pytest.mark.parametrize("accumulate", [None, 2])
@pytest.mark.parametrize("name", ["perceptron", "plain_conv_net", "gpt"])
def test_weights_equal_those_of_one_device_at_every_step(trained, name, accumulate, num_devices, precision):
    dtype = torch.float64 if precision == "fp64" else torch.float32
    num_samples = 8 * 3 + 5  # the last batch is short
    single = trained(SingleStrategy(device="cpu"), *make(name, num_samples, dtype=dtype), precision=precision)
    ours = trained(dp(num_devices, accumulate=accumulate), *make(name, num_samples, dtype=dtype), precision=precision)
    assert len(ours[1]) == 8
    assert largest_difference(ours[1], single[1]) < TOLERANCE[precision]


@pytest.mark.parametrize("num_devices", [2, 3])
def test_batch_norm_normalizes_by_shard_and_keeps_the_statistics_of_replica_0(trained, num_devices):
    data = Data(train=images(24), batch_size=12)
    task, ours = trained(dp(num_devices), ConvNet(), data)
    reference, single = trained(SingleStrategy(device="cpu", accumulate=num_devices), ConvNet(), data)
    parameters = [name for name, _ in reference.named_parameters()]
    assert largest_difference(ours, single, names=parameters) < 1e-6

    mean = torch.zeros(4)  # of the shards of replica 0, with the weights of each step
    follower = ConvNet()
    for step, before in enumerate([weights(follower), *ours[:-1]]):
        follower.load_state_dict(before)
        order = torch.randperm(24, generator=torch.Generator().manual_seed(step // 2))
        first_shard = order[12 * (step % 2) :][: 12 // num_devices]
        activations = follower.network[0](images(24).tensors[0][first_shard])
        mean = 0.9 * mean + 0.1 * activations.mean((0, 2, 3)).detach()
    torch.testing.assert_close(task.network[1].running_mean, mean)
    assert task.network[1].num_batches_tracked.item() == 4


BF16 = {"precision": "bf16-mixed"}
CASES = {
    # devices, settings of dp, the task with its samples, settings of one device, settings of both Trainers
    **{f"last batch of {n}": (3, {}, ("perceptron", 8 + n, 8), {}, {}) for n in (1, 2, 4)},
    "micro-batches": (2, {"micro_batch_size": 3}, ("gpt", 40, 16), {}, {}),
    "mixed precision as accumulation": (2, {}, ("perceptron", 24, 8), {"accumulate": 2}, BF16),
    "clipped by the global norm": (3, {}, ("perceptron", 24, 8), {}, {"max_grad_norm": 0.01}),
}


@pytest.mark.parametrize("case", CASES)
def test_weights_equal_those_of_one_device_with(trained, case):
    num_devices, settings, (name, num_samples, batch_size), alone, common = CASES[case]
    ours = trained(dp(num_devices, **settings), *make(name, num_samples, batch_size=batch_size), **common)
    single = trained(SingleStrategy(device="cpu", **alone), *make(name, num_samples, batch_size=batch_size), **common)
    assert {parameter.dtype for parameter in ours[0].parameters()} == {torch.float32}
    assert largest_difference(ours[1], single[1]) < 1e-6


def test_pre_batched_data_is_split_for_the_replicas(trained):
    inputs, targets = numbers(22).tensors
    batches = [list(rows) for rows in zip(inputs.split(8), targets.split(8), strict=True)]
    ours = trained(dp(2), Perceptron(), Data(train=batches))
    single = trained(SingleStrategy(device="cpu"), Perceptron(), Data(train=batches))
    assert largest_difference(ours[1], single[1]) < 1e-6


def test_checkpoints_resume_under_single_and_under_dp_again(make_trainer, tmp_path):
    def train(strategy, task, *callbacks, run_dir, resume=None):
        trainer = make_trainer(strategy, callbacks=callbacks, max_duration="3epoch", run_dir=run_dir)
        trainer.fit(task, Data(train=numbers(21), batch_size=8), resume=resume)
        return task

    whole = train(SingleStrategy(device="cpu"), Perceptron(), run_dir=tmp_path / "whole")
    train(dp(2), Perceptron(), StopAt(2), run_dir=tmp_path / "run")
    train(SingleStrategy(device="cpu"), Perceptron(), StopAt(5), run_dir=tmp_path / "run", resume=tmp_path / "run")
    resumed = train(dp(3), Perceptron(), SaveAtEnd(), run_dir=tmp_path / "run", resume=tmp_path / "run")
    assert_close(resumed, whole, rtol=1e-5)


# ---- Evaluation and prediction


@pytest.mark.parametrize("name", ["perceptron", "gpt"])
def test_metrics_and_predictions_are_those_of_one_device(make_trainer, name):
    task, _ = make(name, 1)
    data = Data(validation=TASKS[name][1](13), predict=TASKS[name][1](13), batch_size=6)
    ours, single = make_trainer(dp(2)), make_trainer()
    assert ours.validate(task, data) == pytest.approx(single.validate(task, data), rel=1e-6)
    if name == "perceptron":
        torch.testing.assert_close(ours.predict(task, data), single.predict(task, data))


def test_an_evaluation_batch_is_split_over_all_replicas_of_which_none_builds_a_graph(make_trainer):
    class Noting(Perceptron):
        def __init__(self):
            super().__init__()
            self.seen = []

        def validation_step(self, batch):
            self.seen.append((len(batch[0]), torch.is_grad_enabled(), self.training))
            return super().validation_step(batch)

    task = Noting()
    make_trainer(dp(2)).validate(task, Data(validation=numbers(24), batch_size=8))
    assert task.seen == [(2, False, False)] * 12


def test_a_batch_is_split_only_if_every_tensor_has_a_row_for_each_sample():
    rows = torch.arange(5)
    assert [(shard[0].tolist(), size) for shard, size in scatter([rows, rows], 5, num_shards=2)] == [
        ([0, 1, 2], 3),
        ([3, 4], 2),
    ]
    assert len(scatter({"x": rows, "mask": None}, 5, num_shards=7)) == 5
    for whole in ([rows, torch.arange(3)], [rows, torch.tensor(1.0)], [rows, ["a"] * 5], {"x": rows, "total": 5}):
        assert scatter(whole, 5, num_shards=2) == [(whole, 5)]


def test_metrics_logged_in_training_are_means_over_all_shards(make_trainer):
    recorder = Recorder()

    class Still(Perceptron):
        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=0.0)

    task = Still()
    trainer = make_trainer(dp(3), callbacks=[recorder], log_every="1epoch")
    trainer.fit(task, Data(train=numbers(13), batch_size=8))
    expected = nn.functional.mse_loss(task.network(numbers(13).tensors[0]), numbers(13).tensors[1])
    assert recorder.logged[0]["train/loss"] == pytest.approx(expected.item(), rel=1e-6)


# ---- Replicas


class Structured(TaskModule):
    """A structure that is hard to replicate: shared and nested modules, lists of parameters, bound methods, hooks."""

    def __init__(self):
        super().__init__()
        self.recurrent = nn.LSTM(3, 4, batch_first=True)
        self.first = nn.Linear(4, 4)
        self.again = self.first
        self.scales = nn.ParameterList([nn.Parameter(torch.ones(4)), nn.Parameter(torch.ones(4))])
        self.gates = [self.scales[0], self.scales[1]]
        self.measure = self.loss_of
        self.frozen = nn.Parameter(torch.full((4,), 2.0), requires_grad=False)
        self.normed = nn.utils.parametrizations.weight_norm(nn.Linear(4, 1))
        self.first.register_forward_hook(lambda module, inputs, output: output * module.weight.sum())

    def forward(self, inputs):
        hidden, _ = self.recurrent(inputs)
        hidden = self.again(self.first(hidden[:, -1])) * self.frozen
        for gate in self.gates:
            hidden = hidden * gate
        return self.normed(hidden)

    def loss_of(self, inputs):
        return self(inputs).square().mean()

    def training_step(self, batch):
        return self.measure(batch[0])

    def configure_optimizers(self):
        return torch.optim.SGD([p for p in self.parameters() if p.requires_grad], lr=0.01)


def test_shared_modules_lists_methods_and_hooks_are_replicated(trained):
    torch.manual_seed(1)
    task, other = Structured(), Structured()
    other.load_state_dict(task.state_dict())
    data = Data(train=torch.utils.data.TensorDataset(torch.randn(20, 5, 3)), batch_size=8)
    ours, single = trained(dp(3), task, data), trained(SingleStrategy(device="cpu"), other, data)
    assert largest_difference(ours[1], single[1]) < 1e-6


def test_replicas_share_only_the_memory_of_trained_parameters_with_the_original():
    task = Structured()
    _, replica = replicate(task, [torch.device("cpu")] * 2, phase=nothing)
    originals = {id(tensor) for tensor in [*task.parameters(), *task.modules()]}
    found = [*replica.parameters(), *replica.modules(), *replica.gates, *replica.recurrent._flat_weights]
    assert not any(id(item) in originals for item in found)
    assert replica.measure.__self__ is replica
    shared = [p.data_ptr() == q.data_ptr() for p, q in zip(replica.parameters(), task.parameters(), strict=True)]
    assert shared == [p.requires_grad for p in task.parameters()]
    assert replica.first is replica.again


def test_hooks_that_the_step_of_a_replica_registers_and_removes_are_its_own():
    task = Structured()
    kept = list(task.first._forward_hooks)
    _, replica = replicate(task, [torch.device("cpu")] * 2, phase=nothing)
    inputs = torch.randn(2, 5, 3)
    expected = task(inputs)

    handles = [
        replica.first.register_forward_hook(lambda module, args, kwargs, output: output * 0.0, with_kwargs=True),
        replica.first.register_forward_pre_hook(lambda module, args: (args[0] * 0.0,)),
        replica.recurrent.register_forward_hook(lambda module, args, output: None, always_call=True),
    ]

    assert torch.equal(task(inputs), expected)
    assert not torch.equal(replica(inputs), expected)
    for handle in handles:
        handle.remove()
    assert torch.equal(replica(inputs), expected)
    assert list(task.first._forward_hooks) == list(replica.first._forward_hooks) == kept


@on_gpu
def test_gradients_of_replicas_on_another_device_arrive_on_the_master():
    torch.manual_seed(0)
    devices = [torch.device("cpu"), torch.device("cuda:0"), torch.device("cpu")]
    task, inputs = Structured().double(), torch.randn(3, 4, 5, 3, dtype=torch.float64)
    replicas = replicate(task, devices, phase=nothing)
    sum(r.loss_of(x.to(d)).cpu() for r, x, d in zip(replicas, inputs, devices, strict=True)).backward()
    found = [parameter.grad.clone() for parameter in task.parameters() if parameter.requires_grad]
    task.zero_grad()
    sum(task.loss_of(x) for x in inputs).backward()
    expected = [parameter.grad for parameter in task.parameters() if parameter.requires_grad]
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-12)


def test_a_parameter_that_no_replica_uses_has_no_gradient():
    class Unused(Perceptron):
        def build(self):
            super().build()
            self.unused = nn.Parameter(torch.ones(2))

    task = Unused()
    strategy = dp(2)
    Trainer(strategy, callbacks=[], loggers=[], fast_dev_run=True).fit(task, Data(train=numbers(8), batch_size=8))
    assert task.unused.tolist() == [1.0, 1.0]
    replicas = replicate(task, [torch.device("cpu")] * 3, phase=nothing)
    sum(replica.training_step(numbers(4).tensors)["loss"] for replica in replicas).backward()
    assert task.unused.grad is None and task.network[0].weight.grad is not None


def test_torchscript_modules_raise_an_error_with_a_remedy(make_trainer):
    scripted = torch.jit.trace(nn.Linear(8, 1), torch.zeros(1, 8))

    class Scripted(Perceptron):
        def build(self):
            self.network = scripted

    with pytest.raises(UserError, match=r"TorchScript .*strategy=ddp"):
        make_trainer(dp(2)).fit(Scripted(), Data(train=numbers(8), batch_size=8))
    make_trainer(dp(1), max_duration="1step").fit(Scripted(), Data(train=numbers(8), batch_size=8))  # no replicas


# ---- Threads and random numbers


def test_replicas_run_in_separate_threads_after_the_first_step(make_trainer):
    class Threads(Perceptron):
        def __init__(self):
            super().__init__()
            self.seen = []
            self.meeting = threading.Barrier(3, timeout=600)

        def training_step(self, batch):
            self.seen.append(threading.get_ident())
            if len(self.seen) > 3:
                self.meeting.wait()  # passes only if all three are in it at once
            return super().training_step(batch)

    task = Threads()
    make_trainer(dp(3)).fit(task, Data(train=numbers(24), batch_size=12))
    assert task.seen[:3] == [threading.get_ident()] * 3
    assert len(set(task.seen[3:])) == 3 and threading.get_ident() in task.seen[3:]


def test_threads_end_with_training(make_trainer):
    before = set(threading.enumerate())
    make_trainer(dp(3)).fit(Perceptron(), Data(train=numbers(24), batch_size=8))
    assert set(threading.enumerate()) <= before


def draw_torch(module, inputs):
    return nn.functional.dropout(inputs[0], 0.5)


def draw_python(module, inputs):
    return inputs[0] * random.random()


def test_functions_that_are_compiled_as_one_graph_stay_compiled(make_trainer):
    graphs = []

    def backend(graph, inputs):
        graphs.append(graph)
        return graph

    class Compiled(Perceptron):
        def training_step(self, batch):
            double = torch.compile(lambda inputs: 2 * inputs, fullgraph=True, backend=backend)
            return super().training_step([double(batch[0]), batch[1]])

    make_trainer(dp(2)).fit(Compiled(), Data(train=numbers(16), batch_size=8))
    assert graphs


def test_replicas_take_turns_if_a_step_draws_and_puts_the_state_back(make_trainer):
    threads = set()

    class Forked(Perceptron):
        def training_step(self, batch):
            threads.add(threading.get_ident())
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(3)
                batch = [batch[0] + torch.randn_like(batch[0]), batch[1]]
            return super().training_step(batch)

    make_trainer(dp(2)).fit(Forked(), Data(train=numbers(48), batch_size=8))
    assert threads == {threading.get_ident()}


@pytest.mark.parametrize("draw", [draw_torch, draw_python])
def test_replicas_that_draw_random_numbers_are_reproducible(make_trainer, draw):
    def train():
        task = Perceptron()
        task.network[2].register_forward_pre_hook(draw)
        make_trainer(dp(3), max_duration="4epoch").fit(task, Data(train=numbers(48), batch_size=24))
        return task

    assert_same_bits(train(), train())


def test_a_task_that_begins_to_draw_later_is_warned_about_once(make_trainer, caplog):
    class LateNoise(Perceptron):
        calls = 0

        def training_step(self, batch):
            type(self).calls += 1
            if self.calls > 4:
                batch = [batch[0] + torch.randn_like(batch[0]), batch[1]]
            return super().training_step(batch)

    with caplog.at_level(logging.WARNING):
        make_trainer(dp(2)).fit(LateNoise(), Data(train=numbers(48), batch_size=8))
    warned = [record for record in caplog.records if "began to draw random numbers" in record.getMessage()]
    assert len(warned) == 1


# ---- Errors


class Failing(Perceptron):
    """Fails if a micro-batch has an input beyond a limit."""

    def training_step(self, batch):
        if batch[0].max() > 50:
            raise KeyError("no such token")
        if batch[0].min() < -50:
            raise TypeError("wrong kind")
        return super().training_step(batch)


@pytest.mark.parametrize("step", [0, 1], ids=["in turn", "at once"])
def test_the_first_shards_error_is_raised_with_its_type_shard_and_device(make_trainer, step):
    data = numbers(18)
    order = torch.randperm(18, generator=torch.Generator().manual_seed(0))
    data.tensors[0][order[9 * step + 4]] = 100.0  # the second of three shards
    data.tensors[0][order[9 * step + 7]] = -100.0  # and another error in the third
    with pytest.raises(KeyError, match=r"no such token \[shard 1 of 3, on cpu\]"):
        make_trainer(dp(3)).fit(Failing(), Data(train=data, batch_size=9))
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("replica")]


def test_an_error_without_text_has_its_shard_and_device_too(make_trainer):
    class Silent(Perceptron):
        def training_step(self, batch):
            raise StopAsyncIteration(7)

    with pytest.raises(RuntimeError, match=r"StopAsyncIteration: 7 \[shard 0 of 2, on cpu\]") as caught:
        make_trainer(dp(2)).fit(Silent(), Data(train=numbers(8), batch_size=8))
    assert isinstance(caught.value.__cause__, StopAsyncIteration)


@pytest.mark.parametrize("devices", [0, -1, True, "cpu", [], 1.5, None])
def test_devices_are_a_number_or_a_list(devices):
    with pytest.raises(UserError, match=r"devices must be .*strategy.devices=2"):
        DataParallelStrategy(devices=devices)


@pytest.mark.parametrize(
    ("devices", "message"),
    [(["cpu", "cuba:0"], "unknown device 'cuba:0'.*cuda"), (["cpu", "cuda:77"], "device 'cuda:77' is not available")],
)
def test_missing_devices_raise_an_error_before_training(make_trainer, devices, message):
    with pytest.raises(UserError, match=message):
        make_trainer(DataParallelStrategy(devices=devices)).fit(Perceptron(), Data(train=numbers(8), batch_size=8))


def test_a_number_of_devices_without_gpu_is_a_number_of_replicas():
    expected = ["cpu"] * 4 if not torch.cuda.is_available() else None
    if expected is not None:
        assert [str(device) for device in DataParallelStrategy(devices=4).devices] == expected
        assert [str(device) for device in DataParallelStrategy().devices] == ["cpu", "cpu"]


# ---- Messages


def test_a_run_warns_once_of_the_cost_of_transfers_and_names_ddp(make_trainer, caplog):
    with caplog.at_level(logging.WARNING):
        make_trainer(dp(2)).fit(Perceptron(), Data(train=numbers(80), batch_size=8))
    (note,) = [record.getMessage() for record in caplog.records if record.name.startswith("trainkit.strategies.dp")]
    assert "strategy=ddp" in note and "steps 3 to 5" in note
    (percentage,) = [float(text.split()[0]) for text in note.split("spent ")[1:]]
    assert 0 < percentage < 100
    for phase in ("scatter", "replicate", "gather", "sum"):
        assert f"{phase} " in note


def test_micro_batch_size_is_a_limit_for_one_device():
    plan = dp(2, micro_batch_size=3).plan(16)
    assert (plan.micro_batches, plan.micro_batch_size) == (6, 3)


def test_the_plan_has_the_number_of_devices():
    assert str(dp(2, accumulate=2).plan(32)) == "global batch 32 = 1 rank x 2 rounds x 2 devices x 8 samples"


def test_accumulation_that_does_not_divide_the_batch_raises_an_error():
    with pytest.raises(UserError, match="batch_size=8 cannot be split into accumulate=3"):
        dp(2, accumulate=3).plan(8)


def test_changed_attributes_and_buffers_are_those_of_replica_0(make_trainer):
    class Counting(Perceptron):
        def __init__(self):
            super().__init__()
            self.register_buffer("rows", torch.zeros(()))
            self.steps = 0

        def training_step(self, batch):
            self.rows += len(batch[0])
            self.steps += 1
            return super().training_step(batch)

    task = Counting()
    make_trainer(dp(2)).fit(task, Data(train=numbers(16), batch_size=8))
    assert (task.rows.item(), task.steps) == (8.0, 2)


def test_callbacks_see_the_bare_task(make_trainer):
    class Names(Callback):
        def on_fit_end(self, run):
            self.names = list(run.strategy.state_dict(run.task))

    seen = Names()
    make_trainer(dp(2), callbacks=[seen]).fit(Regression(), Data(train=regression_data(8), batch_size=8))
    assert seen.names == ["network.0.weight", "network.0.bias"]


class Teacher(Perceptron):
    """Updates frozen parameters and a buffer in the step."""

    def build(self) -> None:
        super().build()
        self.teacher = nn.Parameter(torch.zeros(3), requires_grad=False)
        self.register_buffer("count", torch.zeros(()))

    def training_step(self, batch):
        with torch.no_grad():
            self.teacher.add_(1.0)
            self.count.add_(1.0)
        return super().training_step(batch)


@pytest.mark.parametrize("num_devices", [1, 2, 3])
def test_frozen_parameters_and_buffers_are_updated_once_a_step(trained, num_devices):
    task, steps = trained(dp(num_devices), Teacher(), Data(train=numbers(24), batch_size=12), max_duration="2step")
    assert len(steps) == 2
    assert task.teacher.tolist() == [2.0] * 3
    assert task.count.item() == 2.0


class ChangesTrained(Perceptron):
    """Changes a trained parameter in the step, in the way that `how` says."""

    def training_step(self, batch):
        layer = next(module for module in self.modules() if isinstance(module, nn.Linear))
        if self.how == "written":
            with torch.no_grad():
                layer.bias.mul_(0.5)
        elif self.how == "frozen":
            layer.bias.requires_grad_(False)
        else:
            layer.bias = layer.bias
        return super().training_step(batch)


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ("written", r"ChangesTrained\.training_step changes .*bias, a trained parameter, which each replica would"),
        ("frozen", "a step freezes, assigns or hooks a parameter, which only replica 0 can do"),
        ("assigned", "a step freezes, assigns or hooks a parameter, which only replica 0 can do"),
    ],
)
def test_a_trained_parameter_that_the_step_changes_is_refused_by_name(make_trainer, how, message):
    task = ChangesTrained()
    task.how = how
    with pytest.raises(UserError, match=message):
        make_trainer(dp(2), max_duration="2step").fit(task, Data(train=numbers(24), batch_size=12))


class Bank(Perceptron):
    """Adds what it has seen to a buffer in the step."""

    def __init__(self, *, persistent: bool) -> None:
        super().__init__()
        self.register_buffer("bank", torch.zeros(0), persistent=persistent)

    def training_step(self, batch):
        self.bank = torch.cat([self.bank, batch[0].detach().flatten()[:1]])
        return super().training_step(batch)


def test_a_buffer_that_grows_with_the_samples_of_one_replica_is_refused_by_name(make_trainer):
    with pytest.raises(
        UserError, match=r"Bank\.training_step changes the shape of bank, a buffer, from \(0,\) to \(1,\)"
    ):
        make_trainer(dp(2), max_duration="2step").fit(Bank(persistent=True), Data(train=numbers(24), batch_size=12))


@pytest.mark.parametrize(("num_devices", "persistent"), [(1, True), (2, False)])
def test_a_buffer_may_grow_on_one_device_or_as_a_cache(trained, num_devices, persistent):
    data = Data(train=numbers(24), batch_size=12)
    task, _ = trained(dp(num_devices), Bank(persistent=persistent), data, max_duration="2step")
    assert task.bank.shape == (2,)
