"""A pipeline trains any task to the weights of one process."""

import random

import numpy
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tests.marks import EVERY_CASE, in_make_zoo
from tests.strategies.pipeline.models import OWN, EncoderDecoder, Gpt, ManyInputs, Mlp
from tests.strategies.pipeline.recipe_models import RECIPES
from tests.strategies.pipeline.training import compare
from trainkit.testing import run_ranks

DOUBLE, SINGLE = 1e-10, 1e-6
SHORT_LAST = [4, 4, 4, 3]


def _differences(cases):
    return {case["name"]: compare(case["model"], **case["settings"]) for case in cases}


def _case(model, *, name=None, **settings):
    return {"name": name or model.__name__, "model": model, "settings": {"sizes": SHORT_LAST, **settings}}


def _assert_equal(num_ranks, cases, *, tolerance):
    differences = run_ranks(_differences, num_ranks, cases, timeout=150)[0]

    assert len(differences) == len(cases)
    assert {name: value for name, value in differences.items() if not value <= tolerance} == {}


VIRTUAL = {"schedule": "interleaved_1f1b", "num_steps": 3}


class _Weightless(Mlp):
    """Says of its samples that they do not count."""

    def training_step(self, batch):
        return {**super().training_step(batch), "weight": 0.0}


class _Reverse(torch.autograd.Function):
    @staticmethod
    def forward(ctx, inputs):
        return inputs.view_as(inputs)

    @staticmethod
    def backward(ctx, gradient):
        return -0.5 * gradient


class _Reversed(Mlp):
    """Reverses gradients right before the split point, and uses what a hook keeps of a part of the first stage."""

    def __init__(self):
        super().__init__()
        self.kept = []
        self.net[0].register_forward_hook(self.keep)

    def keep(self, module, args, output):
        self.kept.append(output)

    def training_step(self, batch):
        self.kept.clear()
        hidden = _Reverse.apply(self.net[:7](batch[0]))
        return F.cross_entropy(self.net[7:](hidden), batch[1]) + self.kept[0].square().mean()


def test_every_kind_of_task_in_two_stages_has_the_weights_of_one_process():
    _assert_equal(2, [_case(model) for model in OWN.values()], tolerance=DOUBLE)


@pytest.mark.slow
def test_weights_of_0_values_written_in_place_and_gradients_of_the_users_own_are_those_of_one_process():
    cases = [_case(_Weightless, sizes=[4], num_steps=2)]
    cases += [_case(_Weightless, sizes=[4, 4], num_steps=2, name="weights of 0 that are added up")]
    cases += [_case(Mlp, split_points=["net.8"], name="a stage that begins with a write into what it was sent")]
    cases += [_case(Mlp, schedule=name, max_in_flight=1, name=f"{name}, one at a time") for name in ("1f1b", "gpipe")]
    cases += [_case(Mlp, max_in_flight=3, name="one ahead")]
    cases += [_case(_Reversed, num_steps=3, split_points=["net.7"]), _case(_Reversed, num_steps=3, name="anywhere")]
    cases += [_case(Mlp, split_points=["net.2", "net.8", "net.14"], name="the same on one rank", **VIRTUAL)]
    _assert_equal(2, cases, tolerance=DOUBLE)


@pytest.mark.slow
def test_a_value_that_several_stages_use_gets_the_gradients_of_all_of_them():
    _assert_equal(4, [_case(EncoderDecoder, num_steps=3)], tolerance=DOUBLE)


BOTH = ("1f1b", "gpipe")


@pytest.mark.slow
@in_make_zoo
@pytest.mark.parametrize(("num_ranks", "schedules"), [(2, ["gpipe"]), (4, BOTH)])
def test_every_kind_of_task_has_the_weights_of_one_process_under_every_schedule(num_ranks, schedules):
    cases = [
        _case(model, schedule=schedule, name=f"{model.__name__} {schedule}")
        for model in OWN.values()
        for schedule in schedules
    ]

    _assert_equal(num_ranks, cases, tolerance=DOUBLE)


@pytest.mark.slow
@in_make_zoo
@pytest.mark.parametrize("num_ranks", [2, 4])
def test_single_precision_agrees_as_far_as_it_goes(num_ranks):
    cases = [
        _case(model, schedule=schedule, name=f"{model.__name__} {schedule}", precision="fp32")
        for model in OWN.values()
        for schedule in BOTH
    ]

    _assert_equal(num_ranks, cases, tolerance=SINGLE)


@pytest.mark.slow
def test_stages_with_copies_and_clipping_have_the_weights_of_one_process():
    cases = [
        _case(Mlp, replicas=2, clip=0.2),
        _case(Gpt, replicas=2, clip=0.2, num_steps=3),
        _case(ManyInputs, name="weights that the task gives itself", replicas=2),
        _case(Gpt, name="several stages a rank", replicas=2, clip=0.2, schedule="interleaved_1f1b", num_steps=3),
        _case(Mlp, name="a replica without samples", replicas=2, sizes=[3], num_steps=3),
    ]

    _assert_equal(4, cases, tolerance=DOUBLE)


class _Frozen(Mlp):
    """Trains its last layers only: no gradient crosses the split point."""

    def __init__(self):
        super().__init__()
        self.net[:8].requires_grad_(False)


def test_frozen_stages_are_sent_no_gradients():
    _assert_equal(3, [_case(_Frozen, num_steps=3, split_points=["net.5", "net.10"])], tolerance=DOUBLE)


class _Measures(nn.Module):
    """Returns facts about a batch as Python numbers and a shape."""

    def forward(self, x):
        positive = int((x > 0).sum())
        return x, {"rows": x.shape[0], "shape": x.size(), "positive": positive, "share": positive / x.numel()}


class _Measured(Mlp):
    """Divides by numbers that a module of an early stage returns; another batch has others."""

    def __init__(self):
        super().__init__()
        self.measures = _Measures()

    def training_step(self, batch):
        inputs, targets = batch
        x, found = self.measures(self.net[:4](inputs))
        assert found["shape"] == x.shape
        loss = F.cross_entropy(self.net[4:](x), targets, reduction="sum") / found["rows"]
        loss = loss / (1 + found["positive"])
        return {"loss": loss * (1 if found["share"] < 0.4 else 2), "share": found["share"]}


def test_numbers_that_a_module_returns_are_those_of_each_batch_in_every_stage():
    through = {"split_points": ["net.5", "net.8", "net.11"], "schedule": "interleaved_1f1b"}
    cases = [
        _case(_Measured, num_steps=3, split_points=["net.8"]),
        _case(_Measured, num_steps=3, name="by way of other stages", **through),
    ]

    _assert_equal(2, cases, tolerance=DOUBLE)


class _Detaching(nn.Linear):
    """Detaches its input always, and its weight for the first `count` batches."""

    def __init__(self, count):
        super().__init__(16, 16)
        self.count = count
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x):
        self.calls += 1
        weight = self.weight.detach() if self.calls <= self.count else self.weight
        return F.linear(x.detach(), weight, self.bias)


class _Detached(Mlp):
    """The body is used by a metric alone, and so has no gradient; the tied weight gets its first one in step 3."""

    def __init__(self):
        super().__init__()
        self.first, self.second = _Detaching(99), _Detaching(8)
        self.second.weight = self.first.weight

    def training_step(self, batch):
        body = self.net[:19](batch[0])
        logits = self.net[19](self.second(self.first(body)))
        return {"loss": F.cross_entropy(logits, batch[1]), "size": body.mean()}


def test_a_parameter_without_a_gradient_is_left_alone_by_the_optimizer():
    # AdamW's weight decay moves what has a gradient of zeros.
    settings = {"num_steps": 4, "shared_parameters": "replicated"}
    several = {"split_points": ["net.8", "first", "second"], "schedule": "interleaved_1f1b", **settings}
    cases = [
        _case(_Detached, split_points=["first"], **settings),
        _case(_Detached, name="tied across the split", split_points=["second"], **settings),
        _case(_Detached, name="by way of other stages", **several),
    ]

    _assert_equal(2, cases, tolerance=DOUBLE)


class _CompiledParts(Mlp):
    """Has its layers compiled, as `trainer.compile=true` does with a task that has no forward."""

    def __init__(self):
        super().__init__()
        for layer in self.net:
            layer.compile(backend="eager")


@pytest.mark.slow
def test_compiled_modules_are_leaf_modules():
    _assert_equal(2, [_case(_CompiledParts, num_steps=2)], tolerance=DOUBLE)


@pytest.mark.slow
def test_several_stages_a_rank_have_the_weights_of_one_process():
    cases = [
        _case(model, schedule="interleaved_1f1b", num_steps=4, name=f"{model.__name__} {sizes}", sizes=sizes)
        for model in (Mlp, Gpt)
        for sizes in ([3, 3, 2], [2, 2, 2, 2])
    ]

    _assert_equal(2, cases, tolerance=DOUBLE)


@pytest.mark.slow
@pytest.mark.parametrize("num_ranks", [2, pytest.param(4, marks=in_make_zoo)])
def test_models_of_the_transformers_package_need_no_change(num_ranks):
    pytest.importorskip("transformers", reason="needs transformers: pip install 'trainkit-torch[transformers]'")
    from tests.strategies.pipeline.library_models import LIBRARY

    exact = {name: model for name, model in LIBRARY.items() if name not in ("Mixtral", "Llava")}
    if not EVERY_CASE:  # one of three; test_zoo.py has others, in stages of one process
        exact = dict(list(exact.items())[::3])
    cases = [_case(model, schedule=BOTH[index % 2], num_steps=3) for index, model in enumerate(exact.values())]
    # Llava makes a tensor of each image: every micro-batch needs as many.
    cases.append(_case(LIBRARY["Llava"], sizes=[4, 4], num_steps=3))
    # A pass of each model under the other schedule, on two ranks or on four.
    others = {2: ("Gpt2", "Bert", "T5"), 4: ("Llama", "Vit", "LibraryResNet")}[num_ranks]
    cases += [
        _case(exact[name], schedule=BOTH[1 - list(exact).index(name) % 2], num_steps=3, name=f"{name} again")
        for name in others
        if name in exact
    ]
    _assert_equal(num_ranks, cases, tolerance=DOUBLE)


@pytest.mark.slow
@in_make_zoo
@pytest.mark.parametrize("num_ranks", [2, 4])
def test_every_recipe_has_the_weights_of_one_process_under_both_schedules(num_ranks):
    cases = [
        _case(recipe, schedule=schedule, num_steps=4, name=f"{name} {schedule}")
        for name, recipe in RECIPES.items()
        for schedule in BOTH
    ]

    _assert_equal(num_ranks, cases, tolerance=DOUBLE)


@pytest.mark.slow
@in_make_zoo
def test_models_of_the_transformers_package_agree_in_single_precision():
    pytest.importorskip("transformers", reason="needs transformers: pip install 'trainkit-torch[transformers]'")
    from tests.strategies.pipeline.library_models import LIBRARY

    names = ("Gpt2", "Bert", "Llama", "Vit", "Mixtral")
    _assert_equal(2, [_case(LIBRARY[name], precision="fp32") for name in names], tolerance=SINGLE)


class _Draws(nn.Module):
    def forward(self, x):
        drawn = random.random() + numpy.random.rand()
        return x * (1.0 + drawn), drawn


class _Drawing(Mlp):
    """Draws with torch, Python and numpy, in modules and between them."""

    def __init__(self):
        super().__init__(dropout=0.4)
        self.early, self.late = _Draws(), _Draws()

    def training_step(self, batch):
        hidden, first = self.early(self.net[:4](batch[0]))
        hidden = self.net[4:16](hidden) * random.random()
        hidden, second = self.late(hidden)
        loss = F.cross_entropy(self.net[16:](hidden), batch[1])
        return {"loss": loss, "first": first, "second": second}


def _masks(schedule, cut):
    """Return the weights after training with random numbers, and some of these."""
    from trainkit.strategies.pipeline.strategy import PipelineStrategy

    from tests.strategies.pipeline.training import Training, make, step_batches

    torch.manual_seed(3)
    strategy = PipelineStrategy(stages=2, schedule=schedule, split_points=[cut], device="cpu")
    training = Training(make(_Drawing), strategy)
    drawn = []
    for step_batch in step_batches(_Drawing, sizes=[4, 4, 4], num_steps=3):
        outputs, _ = training.step(step_batch)
        drawn += [output.metrics[name] for output in outputs for name in ("first", "second")]
    weights = training.weights()
    strategy.teardown()
    return weights["net.0.weight"], drawn


def _both_masks():
    return _masks("gpipe", "net.7"), _masks("1f1b", "net.7"), _masks("1f1b", "net.18")


def test_the_same_random_numbers_are_drawn_under_every_schedule_and_partition():
    (simple, drawn), interleaved, (elsewhere, drawn_elsewhere) = run_ranks(_both_masks, 2)[0]

    assert torch.equal(simple, interleaved[0]) and drawn == interleaved[1] == drawn_elsewhere
    assert torch.allclose(simple, elsewhere, rtol=0.0, atol=1e-12)
    assert len(drawn) == len(set(drawn)) == 18


class FreezingMlp(Mlp):
    """Freezes its first layer when it makes its optimizer, which is after the strategy has seen the task."""

    def configure_optimizers(self):
        self.net[0].requires_grad_(False)
        return torch.optim.SGD(self.parameters(), lr=0.1)


def _frozen_difference():
    return compare(FreezingMlp, sizes=[4, 4], num_steps=3, clip=0.1)


def test_what_is_frozen_as_the_optimizer_is_made_stays_as_it_is():
    assert run_ranks(_frozen_difference, 2)[0] <= 1e-10
