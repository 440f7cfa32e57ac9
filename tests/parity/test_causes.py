"""`trainkit parity` names the cause of a difference: the first part of a step that is not that of `single`."""

from __future__ import annotations

import json
import random
import re
import shlex
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional
from trainkit.strategies.single import SingleStrategy

from tests.equality import ConvNet, Perceptron, images, numbers
from tests.parity.test_compare import Boasting, Corrupting, Duel, Touchy
from trainkit import Data
from trainkit.cli.main import main
from trainkit.parity.compare import compare_strategies
from trainkit.parity.trials import ParityRuns


def data():
    return Data(train=numbers(24), batch_size=8)


def cause_of(task, strategy="dp", *, train=None, steps=3, **settings):
    report = compare_strategies(task, train or data(), [strategy], steps=steps, **settings)
    row = report.rows[1]
    assert row.verdict == "different" and f"\n{row.strategy}: {row.cause.text}" in report.as_table()
    assert json.loads(report.as_json())["rows"][1]["cause"] == {"kind": row.cause.kind, "text": row.cause.text}
    return row.cause


def test_equal_strategies_are_not_trained_again(monkeypatch):
    monkeypatch.setattr(ParityRuns, "observe", None)
    row = compare_strategies(Perceptron(), data(), ["dp"], steps=2).rows[1]
    assert (row.verdict, row.cause) == ("equal", None)


# ---- Data and random numbers


class Counting:
    """Returns other numbers each time that it is read."""

    def __init__(self):
        self.reads = 0

    def __len__(self):
        return 24

    def __getitem__(self, index):
        self.reads += 1
        return torch.full((8,), self.reads / 100), torch.ones(1)


def test_a_dataset_that_returns_other_samples_is_told_by_its_data():
    cause = cause_of(Perceptron(), train=Data(train=Counting(), batch_size=8))
    assert cause.kind == "data" and cause.text.startswith("step 1: the samples of the global batch are not the same.")


def padded(samples):
    inputs = nn.utils.rnn.pad_sequence([inputs for inputs, _ in samples], batch_first=True)
    return inputs, torch.stack([target for _, target in samples])


def test_a_collate_that_pads_is_told_as_its_own_cause():
    class Means(Perceptron):
        def build(self):
            self.line = nn.Linear(1, 1)

        def training_step(self, batch):
            return functional.mse_loss(self.line(batch[0].mean(1, keepdim=True)), batch[1])

    samples = [(torch.ones(1 + index % 7), torch.ones(1)) for index in range(24)]
    cause = cause_of(Means(), train=Data(train=samples, batch_size=8, collate_fn=padded))
    assert cause.kind == "shapes" and "such as padding to the longest" in cause.text


@pytest.mark.parametrize(
    ("name", "draw"), [("torch", lambda: torch.rand(()).item()), ("numpy", np.random.rand), ("python", random.random)]
)
def test_a_task_that_draws_in_its_step_is_told_by_its_draws(name, draw):
    class Drawing(Perceptron):
        def training_step(self, batch):
            return functional.mse_loss(self.network(batch[0] * draw()), batch[1])

    cause = cause_of(Drawing())
    assert cause.kind == "draws" and cause.text.startswith(f"step 1: the step draws random numbers ({name}), ")
    assert "the output of network.0 (Linear) differs first" in cause.text


def test_draws_are_no_cause_where_nothing_is_split():
    class Dropping(Perceptron):
        def training_step(self, batch):
            return functional.mse_loss(self.network(functional.dropout(batch[0], 0.3)), batch[1])

    cause = cause_of(Dropping(), Corrupting(device="cpu"))
    assert cause.kind == "gradient" and "step 3: the same samples and random numbers, and outputs" in cause.text


# ---- Modules, loss, gradients and update


@pytest.mark.parametrize("strategy", ["dp", "ddp"])
def test_a_batch_norm_is_told_by_its_output(strategy):
    cause = cause_of(ConvNet(), strategy, train=Data(train=images(24), batch_size=8), steps=1)
    assert cause.kind == "output" and cause.text.startswith(
        "step 1: the same samples and no random numbers, but the output of network.1 (BatchNorm2d) differs first. "
        "Its statistics are those of a micro-batch"
    )


def test_a_loss_that_is_no_mean_over_samples_is_told_by_the_loss():
    class Summed(Perceptron):
        def training_step(self, batch):
            return functional.mse_loss(self.network(batch[0]), batch[1], reduction="sum")

    cause = cause_of(Summed(lr=0.01))
    assert cause.kind == "loss" and "but the loss differs, and of the gradients first that of network.4" in cause.text
    assert "return the mean over samples" in cause.text


def test_the_loss_of_a_phase_is_told_as_that_of_a_task_with_one():
    class Summed(Duel):
        def last_step(self, batch):
            return (self.network(batch[0]) - batch[1]).square().sum()

    cause = cause_of(Summed())
    assert cause.kind == "loss" and "of the gradients first that of network.4" in cause.text


class Misreporting(SingleStrategy):
    def _grad_norm(self, phase_optimizer):
        return 2 * super()._grad_norm(phase_optimizer)


class InBackward(Corrupting):
    optimizer_in_backward = True


class Hidden(Corrupting):
    supports_module_hooks = False


class Uncopied(Corrupting):
    def __deepcopy__(self, memo):
        raise TypeError("a group cannot be copied")


class Shifting(SingleStrategy):
    def state_dict(self, task):
        return {name: tensor + 1 for name, tensor in super().state_dict(task).items()}


class Drifting(SingleStrategy):
    def optimizer_step(self, phase_optimizer):
        norm = super().optimizer_step(phase_optimizer)
        with torch.no_grad():
            for parameter in phase_optimizer.parameters:
                parameter.mul_(1 + 4e-9)
        return norm


@pytest.mark.parametrize(
    ("strategy", "kind", "text"),
    [
        (Boasting, "loss", "step 1: .* have the same outputs, but the loss differs. The batch is not split either"),
        (Corrupting, "gradient", r"step 3: .* agree, but the gradient of network.2.weight differs, the first"),
        (
            InBackward,
            "update",
            "step 3: .* but network.2.weight after the step differs; no rank has its whole gradient",
        ),
        (Misreporting, "norm", "step 1: .* but the logged norm differs"),
        (Drifting, "rounding", "step 3: .* but differences below the tolerance have grown"),
        (Shifting, "weights", "before the first step: network.* is not that of single"),
        (Hidden, "unknown", "step 3: the same samples and no random numbers. More is not told under Hidden"),
        (Uncopied, "unknown", "step 3: the cause is not told, .*: the strategy cannot be copied"),
    ],
)
def test_a_strategy_that_is_wrong_is_told_by_what_differs_first(strategy, kind, text):
    cause = cause_of(Perceptron(), strategy(device="cpu"))
    assert cause.kind == kind
    assert re.match(text, cause.text)


def test_an_optimizer_that_enlarges_rounding_is_told_by_its_update():
    cause = cause_of(Touchy(), trainer={"precision": "fp32"})
    assert cause.kind == "update" and "but the optimizer's update of shift differs" in cause.text
    assert "compare in fp64" in cause.text


def test_a_tolerance_below_rounding_is_told_with_one_that_is_not():
    cause = cause_of(Perceptron(), tolerance=1e-30)
    assert (cause.kind, cause.text) == (
        "rounding",
        "step 1: rounding alone explains 1e-11 in fp64: type tolerance=1e-11.",
    )


def test_the_page_shows_what_is_printed(capsys):
    page = (Path(__file__).parents[2] / "docs/parity.md").read_text(encoding="utf-8")
    command = page[page.index("trainkit parity recipe=image") :].partition("```")[0].replace("\\\n", " ")
    assert main([*shlex.split(command)[1:], "steps=1", "data.num_workers=0", "data.batch_size=4"]) == 1
    assert capsys.readouterr().out.splitlines()[-1] in page.splitlines()
