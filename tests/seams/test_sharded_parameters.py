"""What user code attaches to parameters, and does with them, where `fsdp` replaces them by shards."""

import copy

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor
from torch.func import functional_call
from torch.utils.hooks import RemovableHandle
from trainkit.strategies.fsdp.parameter_shard import _GuardedShard
from trainkit.strategies.fsdp.strategy import FSDPStrategy

from tests.seams.test_coupled_optimizers import HookInTheRun, WithHook
from tests.seams.test_whole_task import (
    WAYS,
    AsksForMetadata,
    Clip,
    KeepBest,
    Lookahead,
    Prune,
    Replaces,
    Reset,
    Shrink,
    Teacher,
)
from tests.seams.test_whole_task import plain_loop as plain_loop_with_callback
from tests.seams.training import BOUND, MAKE_STRATEGY, Layers, batches, difference, trained
from trainkit import Callback
from trainkit.distributed.pickling import pickled, unpickled
from trainkit.errors import UserError
from trainkit.optim.precision import Precision
from trainkit.testing import run_ranks


@pytest.fixture(autouse=True)
def in_units(tmp_path, monkeypatch):
    """Every linear layer is a unit, unless a test sets `fsdp` itself."""
    monkeypatch.chdir(tmp_path)
    use(monkeypatch)


def use(monkeypatch, units=("Linear",), **settings):
    monkeypatch.setitem(
        MAKE_STRATEGY, "fsdp", lambda: FSDPStrategy(device="cpu", devices=2, units=list(units), **settings)
    )


def plain_loop(task, optimizer=None, *, before_step=lambda step: None, loss=None):
    """Train `task` in a plain loop, and call `before_step` with the number of the step before each of them."""
    optimizer = optimizer or torch.optim.SGD(task.parameters(), lr=0.1, momentum=0.5)
    for step, (inputs, targets) in enumerate(batches()):
        before_step(step)
        (nn.functional.mse_loss(task(inputs), targets) if loss is None else loss(inputs, targets)).backward()
        optimizer.step()
        optimizer.zero_grad()
    return {name: tensor.detach().clone() for name, tensor in task.state_dict().items()}


# ---- Hooks and attributes


def halve(gradient):
    return gradient * 0.5


def halve_accumulated(parameter):
    parameter.grad.mul_(0.5)


class Hooked(Layers):
    """The constructor registers hooks on gradients: elementwise, on the whole matrix, and after accumulation."""

    def finish(self):
        self.a.weight.register_hook(halve)
        self.b.weight.register_hook(lambda gradient: gradient - gradient.mean())
        self.c.weight.register_post_accumulate_grad_hook(halve_accumulated)


class HooksInTheRun(Callback):
    """Registers hooks at the start, and removes one in the third step."""

    def on_fit_start(self, run):
        self.handle = run.task.a.weight.register_hook(halve)
        run.task.c.weight.register_post_accumulate_grad_hook(halve_accumulated)

    def on_step_end(self, run):
        if run.state.step == 3:
            self.handle.remove()


def test_a_hook_that_is_registered_in_another_process_leaves_those_that_came_with_the_module(monkeypatch):
    layer = nn.Linear(2, 2)
    monkeypatch.setattr(RemovableHandle, "next_id", 7)
    layer.register_forward_pre_hook(clamp_data)
    content = pickled(layer)
    monkeypatch.setattr(RemovableHandle, "next_id", 7)  # as in a new process
    copied = unpickled(content)
    copied.register_forward_pre_hook(assign_data)
    assert list(copied._forward_pre_hooks.values()) == [clamp_data, assign_data]


class HookInTheStep(Layers):
    """The third step registers a hook."""

    def training_step(self, batch):
        self.steps = getattr(self, "steps", 0) + 1
        if self.steps == 3:
            self.b.weight.register_hook(halve)
        return super().training_step(batch)


def hook_late(task):
    handles = []

    def change(step):
        if step == 0:
            handles.append(task.a.weight.register_hook(halve))
            task.c.weight.register_post_accumulate_grad_hook(halve_accumulated)
        if step == 3:
            handles[0].remove()

    return change


@pytest.mark.parametrize("units", [("Linear",), ()], ids=["units", "one unit"])
def test_hooks_of_the_constructor_get_whole_gradients(units, monkeypatch):
    use(monkeypatch, units)
    assert difference(trained("fsdp", Hooked()), plain_loop(Hooked())) < BOUND


def test_hooks_of_the_run_are_called_until_they_are_removed():
    task = Layers()
    assert difference(trained("fsdp", Layers(), HooksInTheRun()), plain_loop(task, before_step=hook_late(task))) < BOUND


def test_a_hook_that_a_step_registers_is_called():
    task = Layers()
    reference = plain_loop(task, before_step=lambda step: step == 2 and task.b.weight.register_hook(halve))
    assert difference(trained("fsdp", HookInTheStep()), reference) < BOUND


class Marked(Layers):
    """Attributes and lists of parameters decide the optimizer's settings and the loss."""

    def finish(self):
        self.a.weight.lr_mult = 0.1
        self.decayed = [self.a.weight, {"others": (self.b.weight,)}]
        self.rates = {self.c.weight: 0.05}

    def training_step(self, batch):
        return super().training_step(batch) * (self.a.weight.scale if hasattr(self.a.weight, "scale") else 1.0)

    def configure_optimizers(self):
        decayed = {self.decayed[0], self.decayed[1]["others"][0]}
        return torch.optim.SGD(
            [
                {
                    "params": [parameter],
                    "lr": self.rates.get(parameter, 0.1) * getattr(parameter, "lr_mult", 1.0),
                    "weight_decay": 0.1 if parameter in decayed else 0.0,
                }
                for parameter in self.parameters()
            ]
        )


class Scales(Callback):
    """Sets an attribute that the step reads."""

    def on_fit_start(self, run):
        run.task.a.weight.scale = 0.5


def test_attributes_and_lists_of_parameters_are_those_of_the_shards():
    task = Marked()
    task.a.weight.scale = 0.5

    def loss(inputs, targets):
        return 0.5 * nn.functional.mse_loss(task(inputs), targets)

    reference, marked = plain_loop(task, task.configure_optimizers(), loss=loss), Marked()
    assert difference(trained("fsdp", marked, Scales()), reference) < BOUND
    assert marked.decayed[0] is marked.a.weight and marked.rates[marked.c.weight] == 0.05


class Viewing(Layers):
    def finish(self):
        self.transposed = {"a": self.a.weight.detach().t()}


class OneStorage(Layers):
    def finish(self):
        self.b.weight.data = self.a.weight.data


class BufferOfWeight(Layers):
    def finish(self):
        self.register_buffer("shadow", self.a.weight.data[2:])


@pytest.mark.parametrize(
    ("make_task", "message"),
    [
        (Viewing, r"transposed\.a is in the memory of the parameter a\.weight, which strategy=fsdp"),
        (OneStorage, r"b\.weight is in the memory of the parameter a\.weight"),
        (BufferOfWeight, r"shadow is in the memory of the parameter a\.weight"),
    ],
)
def test_tensors_in_the_memory_of_a_weight_are_refused(make_task, message):
    with pytest.raises(UserError, match=message):
        trained("fsdp", make_task())


class Penalized(Layers):
    """A function keeps a parameter, which the step uses."""

    def finish(self):
        weight = self.a.weight
        self.penalty = lambda: weight.square().sum()

    def training_step(self, batch):
        return super().training_step(batch) + 0.1 * self.penalty()


class Logging(Layers):
    """The step reads a number from a weight of a unit."""

    def training_step(self, batch):
        return {"loss": super().training_step(batch), "bias": float(self.c.bias)}


@pytest.mark.parametrize("make_task", [Penalized, Logging])
def test_a_step_that_uses_a_shard_as_the_whole_is_refused_by_the_name_of_the_parameter(make_task):
    with pytest.raises(UserError, match=r"\w\.\w+ is used as a whole.*strategy=fsdp.*strategy\.units=\[\]"):
        trained("fsdp", make_task())


class Functional(Layers):
    """A layer runs with values that the step computes."""

    def forward(self, inputs):
        values = {"weight": self.scaled(self.c.weight), "bias": self.c.bias}
        return functional_call(self.c, values, torch.tanh(self.b(torch.tanh(self.a(inputs)))))

    def scaled(self, weight):
        return 2.0 * weight


class Generated(Functional):
    """A layer runs with values that another layer computes."""

    def scaled(self, weight):
        return self.a(torch.ones(1, 8, dtype=torch.float64))


@pytest.mark.parametrize(
    ("make_task", "message"),
    [(Functional, r"c\.weight is used as a whole"), (Generated, r"c\.weight is replaced by another tensor")],
)
def test_functional_call_of_a_unit_is_refused(make_task, message):
    with pytest.raises(UserError, match=message):
        trained("fsdp", make_task())


@pytest.mark.parametrize("make_task", [Functional, Generated])
def test_functional_call_is_exact_in_one_unit(make_task, monkeypatch):
    use(monkeypatch, ())
    assert difference(trained("fsdp", make_task()), plain_loop(make_task())) < BOUND


class WithEmpty(Layers):
    def build(self):
        self.nothing = nn.Parameter(torch.zeros(0))
        self.a.nothing = nn.Parameter(torch.zeros(0, 3))

    def forward(self, inputs):
        return super().forward(inputs) + self.nothing.sum() + self.a.nothing.sum()


def test_empty_parameters_are_no_part_of_units():
    weights, reference = trained("fsdp", WithEmpty()), plain_loop(WithEmpty())
    assert weights.pop("nothing").shape == (0,) and weights.pop("a.nothing").shape == (0, 3)
    assert difference(weights, {name: reference[name] for name in weights}) < BOUND


class Unfreezes(Layers):
    """The third step begins to train the first layer."""

    def finish(self):
        self.a.requires_grad_(False)

    def training_step(self, batch):
        self.steps = getattr(self, "steps", 0) + 1
        if self.steps == 3:
            self.a.requires_grad_(True)
        return super().training_step(batch)


@pytest.mark.parametrize("strategy", ["ddp", "fsdp", "pipeline"])
def test_parameters_that_a_setting_freezes_stay_as_they_are(strategy):
    task, frozen = Layers(), ["a.weight", "b.*"]
    before = {name: parameter.detach().clone() for name, parameter in task.named_parameters()}
    weights = trained(strategy, task, freeze=frozen)
    kept = {name for name in before if torch.equal(weights[name], before[name])}
    assert kept == {"a.weight", "b.weight", "b.bias"} and all(p.requires_grad for p in task.parameters())


@pytest.mark.parametrize("units", [("Linear",), ()], ids=["units", "one unit"])
def test_a_step_that_begins_to_train_a_parameter_is_refused(units, monkeypatch):
    use(monkeypatch, units)
    with pytest.raises(UserError, match=r"a\.\w+\.requires_grad was changed during a step.*strategy=fsdp"):
        trained("fsdp", Unfreezes())


class Alone(Layers):
    def finish(self):
        mesh = dist.device_mesh.init_device_mesh("cpu", (1,))
        self.a.weight = nn.Parameter(DTensor.from_local(self.a.weight.detach(), mesh))


@pytest.mark.parametrize("strategy", ["ddp", "torch_ddp", "fusion", "pipeline", "fsdp"])
def test_dtensors_are_refused_before_ranks_start(strategy):
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        with pytest.raises(UserError, match=r"a\.weight of Alone is a DTensor.*Build it as one in __init__"):
            MAKE_STRATEGY[strategy]().validate(Alone(), Precision())
    finally:
        dist.destroy_process_group()


class Imaginary(nn.Parameter):
    def __reduce_ex__(self, protocol):
        return Imaginary, (self.detach().as_subclass(torch.Tensor),)


class OfAClass(Layers):
    def finish(self):
        self.a.weight = Imaginary(self.a.weight.data)


def test_a_parameter_of_a_class_of_its_own_is_refused():
    with pytest.raises(UserError, match=r"a\.weight is a Imaginary.*strategy=ddp"):
        trained("fsdp", OfAClass())


class Clamps(Layers):
    """The step limits the weights of the layer before it uses them, as the critic of a WGAN."""

    def finish(self):
        self.b.register_forward_pre_hook(clamp_data)


def clamp_data(module, inputs):
    module.weight.data.clamp_(-0.2, 0.2)


class Assigns(Clamps):
    def finish(self):
        self.b.register_forward_pre_hook(assign_data)


def assign_data(module, inputs):
    module.weight.data = module.weight.data * 0.9


@pytest.mark.parametrize(
    ("make_task", "message"),
    [(Clamps, r"b\.weight was changed in place"), (Assigns, "data of a parameter .* assigned")],
)
def test_weights_that_a_step_changes_by_data_are_refused(make_task, message):
    with pytest.raises(UserError, match=rf"{message}.*run\.whole_task"):
        trained("fsdp", make_task())


class FrozenAtFirst(Layers):
    """The first layer does not train at first, and samples have weights."""

    def finish(self):
        self.a.requires_grad_(False)

    def training_step(self, batch):
        return {"loss": super().training_step(batch), "weight": weight_of(batch)}


def weight_of(batch):
    return batch[1].abs().sum() + 1.0


class UnfreezesInACallback(Callback):
    def on_step_end(self, run):
        if run.state.step == 2:
            run.task.a.requires_grad_(True)


def test_a_layer_that_a_callback_begins_to_train_has_gradients_of_the_weighted_mean():
    task = FrozenAtFirst()

    def loss(inputs, targets):
        halves = [(inputs[rank::2], targets[rank::2]) for rank in range(2)]
        steps = [task.training_step(half) for half in halves]
        return sum(step["loss"] * step["weight"] for step in steps) / sum(step["weight"] for step in steps)

    reference = plain_loop(task, before_step=lambda step: step == 2 and task.a.requires_grad_(True), loss=loss)
    assert difference(trained("fsdp", FrozenAtFirst(), UnfreezesInACallback()), reference) < BOUND


# ---- Optimizers


def flip(optimizer, args, kwargs):
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            parameter.grad.clamp_(-0.01, 0.01)


class ClampsElements(Layers):
    """Hooks that change each element of gradients by itself: those of the optimizer, and those of the task."""

    def configure_optimizers(self):
        optimizer = super().configure_optimizers()
        optimizer.register_step_pre_hook(flip)
        optimizer.register_step_pre_hook(self.shrink)
        return optimizer

    def shrink(self, optimizer, args, kwargs):
        self.a.weight.grad.mul_(0.5)
        self.b.weight.grad = self.b.weight.grad * 0.25


class NormOfEach(Layers):
    def configure_optimizers(self):
        optimizer = super().configure_optimizers()
        optimizer.register_step_pre_hook(clip_each)
        return optimizer


def clip_each(optimizer, args, kwargs):
    for parameter in optimizer.param_groups[0]["params"]:
        nn.utils.clip_grad_norm_([parameter], 0.1)


def test_a_step_hook_of_elements_is_exact():
    task = ClampsElements()
    assert difference(trained("fsdp", ClampsElements()), plain_loop(task, task.configure_optimizers())) < BOUND


class NormBeforeEachStep(Layers):
    """The step of the optimizer is replaced."""

    def configure_optimizers(self):
        optimizer = super().configure_optimizers()
        step = optimizer.step

        def clipped_step(closure=None):
            clip_each(optimizer, (), {})
            return step(closure)

        optimizer.step = clipped_step
        return optimizer


def test_a_step_that_was_replaced_is_tried_too():
    with pytest.raises(UserError, match=r"SGD.* may use several elements.*strategy=fsdp"):
        trained("fsdp", NormBeforeEachStep())


@pytest.mark.parametrize("make_task", [WithHook, NormOfEach])
def test_a_step_hook_of_whole_gradients_is_refused(make_task):
    with pytest.raises(UserError, match=r"the step hook .* strategy=fsdp leaves each rank some.*max_grad_norm"):
        trained("fsdp", make_task())


def test_a_step_hook_that_comes_in_the_run_is_refused_before_the_next_step():
    with pytest.raises(UserError, match=r"the step hook clip may use several elements"):
        trained("fsdp", Layers(), HookInTheRun())


# ---- Callbacks


@pytest.mark.parametrize(
    "kinds", [(Clip, Shrink, Teacher, Lookahead, KeepBest, Reset), (Prune,)], ids=["in place", "pruned"]
)
def test_callbacks_that_change_weights_have_those_of_a_plain_loop(kinds):
    callbacks = [kind() for kind in kinds]

    def change(task, step):
        for callback in callbacks:
            callback.change(task, step)

    reference = plain_loop_with_callback(change, lambda task: [callback.start(task) for callback in callbacks])
    assert difference(trained("fsdp", Layers(), *[kind() for kind in kinds]), reference) < BOUND


class RunsForward(Callback):
    """Computes the loss of the whole task, in a nested block too, and its gradient."""

    def on_step_end(self, run):
        with run.whole_task() as task, run.whole_task() as same:
            assert same is task
            loss = task.training_step(next(batches()))
            copied = copy.deepcopy(task)
            torch.testing.assert_close(copied.training_step(next(batches())), loss)
            (gradient,) = torch.autograd.grad(loss, [task.a.weight])
            assert gradient.shape == (8, 8)


def test_the_whole_task_runs_forward_and_backward():
    reference = plain_loop_with_callback(lambda task, step: None)
    assert difference(trained("fsdp", Layers(), RunsForward()), reference) < BOUND


class Touches(Callback):
    """Touches a weight in every way, without `whole_task`."""

    def on_step_end(self, run):
        others = {
            "data set": lambda task: setattr(task.c.weight, "data", torch.zeros(1, 8)),
            "conversion": lambda task: task.float(),  # by `double` nothing would be converted
            "gradient": lambda task: setattr(task.c.weight, "grad", torch.zeros(1, 8)),
            "list": lambda task: task.c.bias.tolist(),
        }
        for how, touch in {**WAYS, **others}.items():
            with pytest.raises(UserError, match=r"as a whole.*with run\.whole_task\(\) as task"):
                touch(run.task)
                raise AssertionError(how)


@pytest.mark.parametrize("callback", [Touches, AsksForMetadata])
def test_a_shard_that_is_touched_is_named_and_its_metadata_is_there(callback):
    reference = plain_loop_with_callback(lambda task, step: None)
    assert difference(trained("fsdp", Layers(), callback()), reference) < BOUND


def test_a_parameter_that_is_replaced_in_the_whole_task_is_named():
    with pytest.raises(UserError, match=r"replaced 'c\.weight'"):
        trained("fsdp", Layers(), Replaces())


USES_OF_VALUES = {
    "method": lambda weight: weight.norm(),
    "detached": lambda weight: weight.detach(),
    "list": lambda weight: torch._foreach_norm([weight]),
    "right": lambda weight: torch.ones(weight.shape) + weight,
    "layer": lambda weight: nn.functional.linear(torch.ones(2, weight.shape[1]), weight),
    "in place": nn.init.zeros_,
    "out": lambda weight: torch.ones(weight.shape).copy_(weight),
    "copy": copy.deepcopy,
    "data": lambda weight: weight.data,
    "list of numbers": lambda weight: weight.tolist(),
    "pickle": pickled,
}
USES_OF_METADATA = {
    "shape": lambda weight: weight.shape,
    "type": lambda weight: (weight.dtype, weight.device, weight.is_floating_point(), weight.numel()),
    "gradient": lambda weight: (weight.grad, weight.is_leaf, weight.requires_grad_(False)),
    "like": lambda weight: (torch.zeros_like(weight), weight.new_zeros(3)),
}


def refused_uses(sees):
    """Return the uses of a shard that are refused, with a torch that calls its class for operations, or does not."""
    if not sees:
        _GuardedShard.__torch_dispatch__ = DTensor.__torch_dispatch__
    strategy = FSDPStrategy(device="cpu")
    strategy.setup(Precision())
    task = Layers()
    strategy.prepare(task)
    weight, refused = next(task.parameters()), []
    for use, function in (USES_OF_VALUES | USES_OF_METADATA).items():
        try:
            function(weight)
        except UserError as error:
            assert " is used as a whole" in str(error)
            refused.append(use)
    strategy.teardown()
    return refused


@pytest.mark.parametrize("sees", [True, False])
def test_uses_of_shards_are_refused_by_a_torch_that_does_not_call_the_class_too(sees):
    assert run_ranks(refused_uses, 2, sees) == [list(USES_OF_VALUES)] * 2
