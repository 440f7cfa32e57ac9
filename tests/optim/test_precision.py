"""Number formats of parameters, of the forward pass and of gradients, on the CPU."""

import pytest
import torch
from torch import nn
from trainkit.strategies.single import SingleStrategy

from tests.tasks import EachStep, Recorder, Regression, assert_close, regression_data, weights
from trainkit import Data, UserError
from trainkit.optim.precision import NAMES, Precision

DATA = Data(train=regression_data(16), validation=regression_data(6, seed=1), batch_size=4)


class Types(Regression):
    """Keeps the types that it sees in its steps."""

    def __init__(self, *args, **settings):
        super().__init__(*args, **settings)
        self.seen = {}

    def look(self, step, inputs):
        self.seen[step] = (inputs.dtype, self.network(inputs).dtype)

    def training_step(self, batch):
        self.look("training", batch[0])
        return super().training_step(batch)

    def validation_step(self, batch):
        self.look("validation", batch[0])
        return super().validation_step(batch)


class Small(Regression):
    """Has gradients small enough for the scale that fp16 starts with, 65536."""

    def training_step(self, batch):
        return super().training_step(batch) / 1000


def quick(task):
    return torch.optim.SGD(task.parameters(), lr=50.0)


@pytest.mark.parametrize(
    ("precision", "parameters", "inputs", "outputs"),
    [
        ("fp32", torch.float32, torch.float32, torch.float32),
        ("bf16-mixed", torch.float32, torch.float32, torch.bfloat16),
        ("fp16-mixed", torch.float32, torch.float32, torch.float16),
        ("bf16-true", torch.bfloat16, torch.bfloat16, torch.bfloat16),
        ("fp64", torch.float64, torch.float64, torch.float64),
    ],
)
def test_parameters_inputs_and_outputs_have_the_types_of_the_precision(
    make_trainer, precision, parameters, inputs, outputs
):
    task = Types()
    make_trainer(precision=precision).fit(task, DATA)
    assert {parameter.dtype for parameter in task.parameters()} == {parameters}
    assert task.seen == {"training": (inputs, outputs), "validation": (inputs, outputs)}


@pytest.mark.parametrize("precision", NAMES)
def test_training_learns_in_every_precision(make_trainer, precision):
    task = Regression(lambda task: torch.optim.SGD(task.parameters(), lr=0.1, momentum=0.5))
    data = Data(train=regression_data(64), validation=regression_data(32, seed=1), batch_size=8)
    result = make_trainer(precision=precision, max_duration="10epoch").fit(task, data)
    assert result.metrics["validation/loss"] < 0.05
    predictions = make_trainer(precision=precision).predict(task, Data(predict=regression_data(4), batch_size=4))
    assert predictions.shape == (4, 1)


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_sgd_in_16_bits_updates_every_element(make_trainer, momentum):
    class Wide(Regression):  # more elements than a vector of the CPU
        def __init__(self):
            super().__init__(lambda task: torch.optim.SGD(task.parameters(), lr=1.0, momentum=momentum))
            self.wide = torch.nn.Parameter(torch.zeros(100))

        def training_step(self, batch):
            return self.wide.sum() + super().training_step(batch)

    task = Wide()
    make_trainer(precision="bf16-true", max_duration="1step").fit(task, Data(train=regression_data(8), batch_size=8))
    assert task.wide.tolist() == [-1.0] * 100


@pytest.mark.parametrize("precision", ["bf16-mixed", "fp16-mixed", "fp64"])
def test_accumulation_gives_the_weights_of_one_big_batch_in_every_precision(make_trainer, precision):
    tasks = [Small(quick, hidden=8) for _ in range(2)]
    for task, accumulate in zip(tasks, (1, 4), strict=True):
        strategy = SingleStrategy(device="cpu", accumulate=accumulate)
        make_trainer(strategy, precision=precision, max_duration="2epoch").fit(task, DATA)
    assert_close(*tasks, rtol=1e-7 if precision == "fp64" else 2e-2, atol=1e-2)


def test_integers_of_a_batch_keep_their_type(make_trainer):
    class Labels(Regression):
        def training_step(self, batch):
            assert batch[1].dtype == torch.int64
            return self(batch[0]).square().mean()

    inputs = regression_data(8).tensors[0]
    data = Data(train=torch.utils.data.TensorDataset(inputs, torch.arange(8)), batch_size=4)
    make_trainer(precision="bf16-true").fit(Labels(), data)


def test_an_unknown_precision_is_rejected_with_the_known_ones():
    with pytest.raises(
        UserError, match=r"unknown precision 'fp61'\. Did you mean 'fp64'\? Choose one of fp32, bf16-true"
    ):
        Precision("fp61")


# ---- The scaler of fp16


class Overflow(Small):
    """Has gradients that overflow in the first step only."""

    def __init__(self, optimizer):
        super().__init__(optimizer)
        self.calls = 0

    def training_step(self, batch):
        self.calls += 1
        loss = super().training_step(batch)
        return loss * 1e36 if self.calls == 1 else loss


OPTIMIZERS = {
    "SGD": lambda task: torch.optim.SGD(task.parameters(), lr=0.05),
    "SGD with momentum": lambda task: torch.optim.SGD(task.parameters(), lr=0.05, momentum=0.9),
    "AdamW": lambda task: torch.optim.AdamW(task.parameters(), lr=0.05),
    "RMSprop": lambda task: torch.optim.RMSprop(task.parameters(), lr=0.05),
}


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_step_that_overflows_is_skipped_and_the_scale_is_halved(make_trainer, name, fused):
    scales = EachStep(lambda run: run.precision.scaler.get_scale())
    trained, task = EachStep(lambda run: weights(run.task)["network.0.weight"]), Overflow(OPTIMIZERS[name])
    first = task.network[0].weight.detach().clone()
    settings = {"precision": "fp16-mixed", "max_duration": "4step", "on_nonfinite": "skip"}
    make_trainer(callbacks=[scales, trained], fused_optimizer=fused, **settings).fit(task, DATA)
    assert scales.seen == [2.0**15] * 4
    assert torch.equal(trained.seen[0], first)
    assert all(bool(torch.isfinite(weight).all()) for weight in trained.seen)
    assert not torch.equal(trained.seen[1], first)


def test_a_schedule_of_every_step_works_if_the_first_step_overflows(make_trainer):
    def configure(task):
        optimizer = OPTIMIZERS["SGD"](task)
        return optimizer, torch.optim.lr_scheduler.StepLR(optimizer, 2)

    for fused in (True, False):
        trainer = make_trainer(precision="fp16-mixed", fused_optimizer=fused, max_duration="4step")
        assert trainer.fit(Overflow(configure), DATA).steps == 4


@pytest.mark.parametrize("settings", [{"max_grad_norm": 0.001}, {"max_grad_value": 0.0005}])
def test_gradients_are_clipped_after_they_are_unscaled(make_trainer, settings):
    recorder, tasks = Recorder(), [Small(quick) for _ in range(2)]
    for task, precision in zip(tasks, ("fp16-mixed", "fp32"), strict=True):
        make_trainer(precision=precision, callbacks=[recorder], log_every="1step", **settings).fit(task, DATA)
    assert_close(*tasks, rtol=1e-2, atol=1e-3)
    if "max_grad_norm" in settings:
        norms = [logged["train/grad_norm"] for logged in recorder.logged]
        assert norms[:4] == pytest.approx(norms[4:], rel=1e-2)


def test_the_scaler_continues_from_a_saved_scale():
    saved, fresh = (Precision("fp16-mixed") for _ in range(2))
    for precision in (saved, fresh):
        precision.setup(torch.device("cpu"))
    saved.scale(torch.ones(()))  # the scale is set up on first use
    saved.scaler.update(new_scale=8.0)
    fresh.load_state_dict(saved.state_dict())
    assert fresh.scaler.get_scale() == saved.scaler.get_scale()
    fresh.load_state_dict({})
    assert fresh.scaler.get_scale() == saved.scaler.get_scale()


def test_the_logged_loss_of_fp16_is_the_unscaled_one(make_trainer):
    class Constant(Regression):
        def training_step(self, batch):
            return super().training_step(batch) * 0 + 2.0

    recorder = Recorder()
    make_trainer(precision="fp16-mixed", callbacks=[recorder], log_every="1step").fit(Constant(), DATA)
    assert {logged["train/loss"] for logged in recorder.logged} == {2.0}


def test_the_default_dtype_of_torch_does_not_change(make_trainer):
    make_trainer(precision="fp64").fit(Regression(), DATA)
    assert torch.get_default_dtype() == torch.float32
    assert nn.Linear(1, 1).weight.dtype == torch.float32
