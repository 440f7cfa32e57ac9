"""The task reaches the ranks with its hooks, aliases and parametrizations; parity's reference has them too."""

import copy
import threading
import weakref
from functools import partial

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations, prune

from tests.seams.training import BOUND, Layers, batches, difference, samples, trained
from trainkit import Data, Trainer
from trainkit.distributed.pickling import copied, pickled, unpickled
from trainkit.errors import UserError
from trainkit.parity.compare import assert_strategies_equal
from trainkit.parity.trials import ParityRuns
from trainkit.testing import run_ranks

FACTOR = 0.5
HOOKED = ("single", "dp", "ddp", "torch_ddp", "fusion", "fusion_sharded", "pipeline")  # fsdp replaces parameters
SENT = ("ddp", "fusion", "pipeline")


def plain_loop(task, step=lambda task: None):
    """Return the weights of a loop over a task that no strategy has seen."""
    optimizer = task.configure_optimizers()
    for inputs, targets in batches():
        step(task)
        nn.functional.mse_loss(task(inputs), targets).backward()
        optimizer.step()
        optimizer.zero_grad()
    return task.state_dict()


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


# ---- Hooks


def shrink(factor, gradient):
    return gradient * factor


class Hooked(Layers):
    """Hooks on parameters: a lambda, a bound method, a partial, a closure, one that was removed."""

    def finish(self):
        self.scale = 2.0
        removed = self.a.weight.register_hook(lambda gradient: gradient * 100)
        removed.remove()
        self.a.weight.register_hook(lambda gradient: gradient * FACTOR)
        self.a.bias.register_hook(self.scaled)
        self.b.weight.register_hook(partial(shrink, 0.25))
        other = self.b.weight
        self.c.bias.register_hook(lambda gradient: gradient * other.shape[0])

    def scaled(self, gradient):
        return gradient * self.scale


@pytest.mark.parametrize("strategy", HOOKED)
def test_hooks_of_the_constructor_work_on_every_rank(strategy):
    assert difference(trained(strategy, Hooked()), plain_loop(Hooked())) < BOUND


class Counting(Layers):
    """Hooks of modules that share a variable, one of which needs the other's."""

    def finish(self):
        calls = 0

        def count(module, inputs):
            nonlocal calls
            calls += 1

        def scale(module, inputs, output):
            return output * (1.0 if calls else 0.0)

        self.a.register_forward_pre_hook(count)
        self.a.register_forward_hook(scale)
        self.b.register_forward_pre_hook(lambda module, args, kwargs: None, with_kwargs=True)


class HooksInStep(Layers):
    """Registers its hook in the first step, by a method of the parameter."""

    method, is_hooked = "register_hook", False

    def training_step(self, batch):
        if not self.is_hooked:
            self.is_hooked = True
            getattr(self.a.weight, self.method)(lambda gradient: gradient * FACTOR)
        return super().training_step(batch)


@pytest.mark.parametrize("strategy", ("single", "ddp"))
def test_a_hook_that_the_step_registers_works_on_every_rank(strategy):
    def register(task):
        if not task.is_hooked:
            task.is_hooked = True
            task.a.weight.register_hook(lambda gradient: gradient * FACTOR)

    assert difference(trained(strategy, HooksInStep()), plain_loop(HooksInStep(), register)) < BOUND


@pytest.mark.parametrize(
    ("method", "message"),
    [
        ("register_hook", r"HooksInStep\.training_step registers a hook on the gradient of a\.weight"),
        ("register_post_accumulate_grad_hook", "assigns or hooks a parameter, which only replica 0 can do"),
    ],
)
def test_a_hook_that_replicas_of_one_process_would_call_twice_is_refused_by_name(method, message):
    task = HooksInStep()
    task.method = method
    with pytest.raises(UserError, match=message):
        trained("dp", task)


@pytest.mark.parametrize("strategy", ("ddp", "fsdp"))
def test_hooks_of_modules_share_their_variables_on_every_rank(strategy):
    assert difference(trained(strategy, Counting()), plain_loop(Counting())) < BOUND


def test_parity_has_the_hooks_in_its_reference(tmp_path):
    data = Data(train=samples(), batch_size=8, shuffle=False)
    assert hooks_of(ParityRuns(Hooked(), data, tmp_path, steps=1, settings={}).task()) == [1, 1, 1, 0, 0, 1]
    assert assert_strategies_equal(Hooked(), data, ["single", "ddp"]).is_equal


def hooks_of(task):
    return [len(parameter._backward_hooks or ()) for parameter in task.parameters()]


class Post(Layers):
    def finish(self):
        self.a.weight.register_post_accumulate_grad_hook(halve)


def halve(parameter):
    parameter.grad.mul_(0.5)


def test_a_copy_has_post_accumulate_hooks_which_single_runs():
    task = copied(Post())
    assert difference(trained("dp", task), plain_loop(Post())) < BOUND


class Clamped(Layers):
    def finish(self):
        self.b.weight.register_hook(lambda gradient: gradient.clamp(-0.01, 0.01))


class StepsInBackward(Layers):
    """Updates a parameter as soon as it has a gradient, as PyTorch's tutorial does."""

    def finish(self):
        self.a.weight.register_post_accumulate_grad_hook(update)


def update(parameter):
    with torch.no_grad():
        parameter.sub_(0.1 * parameter.grad)
    parameter.grad = None


class Largest(Layers):
    def finish(self):
        self.a.weight.register_hook(lambda gradient: gradient * (gradient.abs() > gradient.abs().median()))


class Decays(Layers):
    def finish(self):
        weight = self.a.weight
        weight.register_hook(lambda gradient: gradient + 1e-7 * weight.detach())


class CountsCalls(Layers):
    """A factor that becomes smaller with each call."""

    def finish(self):
        self.factor = 1.0
        self.a.weight.register_hook(self.smaller)

    def smaller(self, gradient):
        self.factor *= 0.9
        return gradient * self.factor


@pytest.mark.parametrize("task", (Clamped, StepsInBackward, Largest, Decays))
@pytest.mark.parametrize("strategy", ("single", "ddp", "fsdp", "pipeline"))
def test_a_hook_whose_result_depends_on_the_split_of_a_step_is_refused_by_name(strategy, task):
    with pytest.raises(UserError, match=r"on the gradient of '[ab]\.weight' is called for parts .*max_grad_value"):
        trained(strategy, task())


@pytest.mark.parametrize("task", (Clamped, StepsInBackward, Largest, Decays, CountsCalls))
def test_one_backward_on_one_rank_has_any_hook(task):
    trained_task = task()
    trainer = Trainer(max_duration="1epoch", callbacks=[], loggers=[], num_sanity_batches=0)
    trainer.fit(trained_task, Data(train=samples(), batch_size=8, shuffle=False))
    assert difference(trained_task.state_dict(), plain_loop(task())) < BOUND
    assert difference(trained("dp", task()), plain_loop(task())) < BOUND


def test_a_hook_that_counts_its_calls_works_with_one_micro_batch_on_each_rank():
    assert difference(trained("ddp", CountsCalls()), plain_loop(CountsCalls())) < BOUND
    with pytest.raises(UserError, match=r"1 ranks, 2 backward passes of each"):
        trained("single", CountsCalls())


# ---- Aliases


class Tied(Layers):
    """Two parameters with one storage, and views of a weight."""

    def build(self):
        self.b.weight.data = self.a.weight.data

    def finish(self):
        self.b.weight.data = self.a.weight.data
        self.register_buffer("row", self.a.weight.detach()[0], persistent=False)
        self.flat = self.a.weight.detach().view(-1)
        self.differentiable = self.a.weight[1]
        self.weights = [self.a.weight, self.c.weight]

    def forward(self, inputs):
        scale = 1 + self.row.abs().mean() + self.flat[0] + self.differentiable.sum() + self.weights[1].sum()
        return super().forward(inputs) * scale


@pytest.mark.parametrize("strategy", ("ddp", "fusion"))
def test_weights_of_one_storage_and_views_of_a_weight_stay_what_they_are(strategy):
    assert difference(trained(strategy, Tied()), plain_loop(Tied())) < BOUND


def test_a_copy_has_the_storages_objects_and_strides_of_the_task():
    task = Tied()
    task.wide = torch.ones(1, 4).expand(3, 4)
    task.image = nn.Conv2d(2, 2, 3).to(memory_format=torch.channels_last)
    task.sparse = torch.eye(3).to_sparse()
    array = np.zeros(4)  # two storages of one memory
    task.array, task.same_array = torch.from_numpy(array), torch.from_numpy(array)
    task.complex = nn.Parameter(torch.ones(2, dtype=torch.complex64))
    task.lazy = nn.LazyLinear(2)
    task.optimizer = torch.optim.SGD(task.parameters(), lr=0.1)
    task.parent, task.a.parent = weakref.ref(task.a), weakref.ref(task)
    task.a.weight.lr_mult = 0.1
    task.a.eval()
    task.b.weight.requires_grad_(False)
    for copy_of in (lambda module: unpickled(pickled(module)), copied):
        new = copy_of(task)
        assert new.a.weight.data_ptr() == new.b.weight.data_ptr() == new.row.data_ptr() == new.flat.data_ptr()
        assert new.a.weight.data_ptr() != task.a.weight.data_ptr()
        assert new.weights[0] is new.a.weight is new.optimizer.param_groups[0]["params"][1]
        assert new.differentiable._base is new.a.weight
        assert new.wide.stride() == (0, 1) and new.image.weight.stride() == task.image.weight.stride()
        assert new.array.data_ptr() == new.same_array.data_ptr() != task.array.data_ptr()
        assert new.sparse.is_sparse and new.complex.dtype == torch.complex64
        assert nn.parameter.is_lazy(new.lazy.weight)
        assert new.parent() is new.a and new.a.parent() is new
        assert new.a.weight.lr_mult == 0.1 and not new.a.training and new.b.training
        assert not new.b.weight.requires_grad


class Computed(Layers):
    def finish(self):
        self.scaled = self.a.weight * 2

    def forward(self, inputs):
        return super().forward(inputs) + self.scaled.sum()


def test_a_gradient_into_what_the_constructor_computed_is_refused_by_name():
    with pytest.raises(UserError, match=r"the task's constructor computed from parameters \(MulBackward0\)"):
        trained("ddp", Computed())


# ---- Parametrizations


class Doubled(nn.Module):
    def forward(self, weight):
        return weight * 2


class Parametrized(Layers):
    def build(self):
        parametrizations.weight_norm(self.a)
        parametrizations.spectral_norm(self.b)
        nn.utils.parametrize.register_parametrization(self.c, "bias", Doubled())


class Orthogonal(Layers):
    def build(self):
        parametrizations.orthogonal(self.a)


class Pruned(Layers):
    def build(self):
        prune.l1_unstructured(self.a, "weight", 8)


@pytest.mark.parametrize("task", (Parametrized, Orthogonal, Pruned))
@pytest.mark.parametrize("strategy", ("ddp", "fsdp"))
def test_parametrized_and_pruned_modules_train_on_ranks(task, strategy):
    assert difference(trained(strategy, task()), plain_loop(task())) < BOUND


# ---- What cannot arrive


def test_a_part_that_cannot_be_pickled_is_named():
    task = Layers()
    task.b.lock = threading.Lock()
    with pytest.raises(UserError, match=r"Layers\.b\.lock: cannot pickle .*on_fit_start; or start .* torchrun"):
        trained("ddp", task)


class Forgetful(Layers):
    """Loses a hook on the way, as its state is a copy of its tensors."""

    def __getstate__(self):
        state = dict(vars(self))
        state["_modules"] = copy.deepcopy(state["_modules"])
        return state

    def finish(self):
        self.a.weight.register_hook(halved)


def halved(gradient):
    return gradient * 0.5


def test_a_copy_that_lost_a_hook_is_refused_by_name():
    with pytest.raises(UserError, match=r"is not the same: a\.weight, hooks: 0 in place of 1"):
        trained("ddp", Forgetful())


def test_run_ranks_gives_a_task_with_its_hooks_to_every_rank():
    assert run_ranks(hooks_of, 2, Hooked()) == [[1, 1, 1, 0, 0, 1]] * 2
