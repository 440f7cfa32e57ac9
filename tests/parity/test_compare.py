"""`trainkit parity`: equal strategies are reported as equal, and differences are found."""

from __future__ import annotations

import itertools
import json
import math
import re
from functools import partial

import pytest
import torch
from torch import nn
from torch.nn import functional
from trainkit.strategies.ddp.strategy import DDPStrategy
from trainkit.strategies.dp.strategy import DataParallelStrategy
from trainkit.strategies.fsdp.strategy import FSDPStrategy
from trainkit.strategies.fusion.strategy import FusionStrategy
from trainkit.strategies.pipeline.strategy import PipelineStrategy
from trainkit.strategies.single import SingleStrategy
from trainkit.strategies.torch_ddp import TorchDDPStrategy

from tests.equality import TASKS, ConvNet, Perceptron, images, largest_difference, make, numbers
from tests.marks import in_make_zoo
from tests.tasks import EachStep, fit
from trainkit import Callback, Data, Phase, UserError
from trainkit.cli.main import Arguments, main
from trainkit.cli.parity import parity
from trainkit.errors import Stopped
from trainkit.parity.compare import (
    Difference,
    ParityReport,
    ParityRow,
    _numbers,
    assert_resume_exact,
    assert_strategies_equal,
    compare_strategies,
)
from trainkit.parity.trials import make_strategy
from trainkit.testing import run_ranks


def perceptron_data(num_samples=29):
    return Data(train=numbers(num_samples), batch_size=8)


# ---- Equal strategies


@pytest.mark.parametrize("name", ["perceptron", "gpt"])
def test_strategies_that_agree_are_equal_in_every_column(name):
    task, data = make(name, 29)
    report = compare_strategies(task, data, ["dp", DataParallelStrategy(devices=["cpu"] * 3, accumulate=2)], steps=6)
    assert report.is_equal and not report.notes
    assert [row.strategy for row in report.rows] == ["single", "dp", "DataParallelStrategy"]
    assert [row.verdict for row in report.rows] == ["reference", "equal", "equal"]
    assert [row.layout for row in report.rows] == ["1 x 1 x 8", "1 x 2 x 4", "1 x 4 x 2"]
    assert [row.bytes_a_step for row in report.rows] == [None, 0, 0]  # replicas on one device share memory
    for row in report.rows[1:]:
        assert 0 < row.weights.value < 1e-11 and row.seconds_a_step > 0


def test_the_task_and_the_random_numbers_of_the_caller_are_unchanged():
    task, data = make("perceptron", 16)
    before = [parameter.clone() for parameter in task.parameters()]
    state = torch.get_rng_state()
    compare_strategies(task, data, ["single"], steps=2)
    assert all(torch.equal(old, new) for old, new in zip(before, task.parameters(), strict=True))
    assert torch.equal(torch.get_rng_state(), state)


def test_every_strategy_starts_from_the_same_weights_even_if_tasks_are_made_at_random():
    class Unseeded(Perceptron):
        def __init__(self):
            super().__init__()
            nn.init.normal_(self.network[0].weight, generator=torch.Generator().manual_seed(torch.seed() % 2**31))

    assert compare_strategies(Unseeded, perceptron_data, ["dp"], steps=3).is_equal


def compared_on_this_rank():
    strategies = [
        DDPStrategy(device="cpu", optimizer_in_backward=True),
        FusionStrategy(device="cpu", shard_optimizer=True),
    ]
    rows = compare_strategies(Perceptron(), perceptron_data(), strategies, steps=4).rows
    return [(row.verdict, row.error) for row in rows], [strategy._steps_in_backward for strategy in strategies[1:]]


def test_optimizers_that_step_inside_backward_are_compared_as_they_are():
    # The norm of the gradient is known without a limit that would make them wait for all gradients.
    ((rows, inside),) = run_ranks(compared_on_this_rank, 1)
    assert rows == [("reference", ""), ("equal", ""), ("equal", "")] and inside == [True]


# ---- Strategies that are wrong


class Corrupting(SingleStrategy):
    """Adds a little to one element of one parameter's gradient in one step."""

    steps = 0

    def _normalize_gradients(self, outputs, step_batch):
        super()._normalize_gradients(outputs, step_batch)
        self.steps += 1
        if self.steps == 3:
            self._trained[2].grad[1, 1] += 0.1


def test_a_wrong_gradient_is_found_at_its_step_and_parameter():
    report = compare_strategies(Perceptron(), perceptron_data(), [Corrupting(device="cpu")], steps=3)
    row = report.rows[1]
    assert (row.verdict, row.weights.step, row.weights.parameter) == ("different", 3, "network.2.weight")
    assert row.grad_norm.step == 3 and not report.is_equal


class Doubling(SingleStrategy):
    def _normalize_gradients(self, outputs, step_batch):
        self._scale_gradients(2.0)


def test_a_wrong_scale_is_found_even_under_an_optimizer_that_ignores_scale():
    class Adaptive(Perceptron):
        def configure_optimizers(self):
            return torch.optim.Adam(self.parameters(), lr=1e-3, eps=1e-16)

    row = compare_strategies(Adaptive(), perceptron_data(), [Doubling(device="cpu")], steps=3).rows[1]
    assert row.weights.value < 1e-5
    assert row.grad_norm.value == pytest.approx(1.0, rel=1e-3) and row.verdict == "different"


class Boasting(SingleStrategy):
    """Takes the right steps, but reports smaller losses."""

    def forward_backward(self, task, step_batch):
        outputs = super().forward_backward(task, step_batch)
        for output in outputs:
            output.loss = output.loss * 0.99
        return outputs


def test_a_wrong_loss_is_found_even_if_all_gradients_are_right():
    row = compare_strategies(Perceptron(), perceptron_data(), [Boasting(device="cpu")], steps=2).rows[1]
    assert row.loss.value == pytest.approx(0.01) and row.weights.value == row.grad_norm.value == 0.0
    assert row.verdict == "different"


def test_nan_weights_are_a_difference():
    class Lost(SingleStrategy):
        def state_dict(self, task):
            return {name: tensor * float("nan") for name, tensor in super().state_dict(task).items()}

    report = compare_strategies(Perceptron(), perceptron_data(), [Lost(device="cpu")], steps=1)
    assert report.rows[1].verdict == "different"
    assert "network.0.weight in step 0" in report.as_table()


def test_a_strategy_that_fails_is_a_row_with_its_error():
    class Failing(SingleStrategy):
        def forward_backward(self, task, step_batch):
            raise RuntimeError("no such luck")

    report = compare_strategies(Perceptron(), perceptron_data(), [Failing(device="cpu"), "dp"], steps=2)
    assert [row.verdict for row in report.rows] == ["reference", "failed", "equal"]
    assert "Failing failed: RuntimeError: no such luck" in report.as_table() and not report.is_equal


def test_an_unknown_strategy_is_refused_before_training():
    with pytest.raises(UserError, match=r"unknown strategy 'singel'. Did you mean 'single'\?"):
        compare_strategies(Perceptron(), perceptron_data(), ["singel"])


# ---- Precision and phases


class Duel(Perceptron):
    """Trains its first and its last layer with separate losses."""

    def configure_phases(self):
        return [
            Phase("first", torch.optim.SGD(self.network[0].parameters(), lr=0.1)),
            Phase("last", torch.optim.SGD(self.network[4].parameters(), lr=0.01), every=2),
        ]

    def first_step(self, batch):
        return (self.network(batch[0]) - batch[1]).square().mean()

    last_step = first_step


def test_phases_are_compared_one_by_one():
    class Summed(Duel):
        def last_step(self, batch):
            return (self.network(batch[0]) - batch[1]).square().sum()

    report = compare_strategies(Duel(), perceptron_data(), ["dp"], steps=4, trainer={"precision": "fp32"})
    assert report.is_equal and report.rows[1].loss.value > 0 and report.rows[1].grad_norm.value > 0
    report = compare_strategies(Summed(), perceptron_data(), ["dp", "fusion"], steps=4)
    assert [row.verdict for row in report.rows] == ["reference", "different", "failed"]
    assert report.rows[1].grad_norm.parameter == report.rows[1].loss.parameter == "last"
    assert "which FusionStrategy cannot train" in report.rows[2].error


class Touchy(Perceptron):
    """The gradient of the shift is rounding alone, which Adam scales to whole steps."""

    def build(self):
        super().build()
        self.shift = nn.Parameter(torch.zeros(()))

    def training_step(self, batch):
        factors = torch.tensor([1.0, 2.0, 3.0], dtype=self.shift.dtype)
        logits = self.network(batch[0]) * factors + self.shift
        return functional.cross_entropy(logits, (batch[1][:, 0] > 0).long())

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=1e-3)


def test_strategies_are_compared_in_fp64_where_no_precision_is_named_and_rounding_stays_small():
    report = compare_strategies(Touchy(), perceptron_data(), ["dp"], steps=6)
    assert (report.precision, report.tolerance) == ("fp64", 1e-8) and report.is_equal


def test_a_difference_beyond_the_tolerance_is_one_although_rounding_is_its_cause():
    report = compare_strategies(Touchy(), perceptron_data(), ["dp"], steps=6, trainer={"precision": "fp32"})
    row = report.rows[1]
    assert (row.verdict, row.weights.parameter) == ("different", "shift") and row.weights.value > 1e-5
    assert (report.precision, report.tolerance) == ("fp32", 1e-5) and not report.is_equal


def test_a_task_that_computes_in_fp32_only_is_compared_in_fp32_which_is_noted():
    class Narrow(Perceptron):
        def training_step(self, batch):
            return functional.mse_loss(self.network(batch[0].float()), batch[1].float())

    report = compare_strategies(Narrow(), perceptron_data(), ["dp"], steps=2)
    assert (report.precision, report.tolerance) == ("fp32", 1e-5) and report.is_equal
    (note,) = report.notes
    assert note.startswith("compared in fp32, as single failed in fp64: RuntimeError: ") and note in report.as_table()


class Narrowed(Perceptron):
    reduction = "mean"

    def training_step(self, batch):
        return functional.mse_loss(self.network(batch[0]).float(), batch[1].float(), reduction=self.reduction)


def test_a_task_that_converts_its_loss_to_fp32_has_the_tolerance_of_fp32_which_is_noted():
    report = compare_strategies(Narrowed(), perceptron_data(), ["dp"], steps=4)
    assert (report.precision, report.tolerance) == ("fp64", 1e-5) and report.is_equal
    assert report.rows[1].loss.value > 1e-8  # halves are rounded otherwise than the whole
    assert report.notes == ("tolerance of fp32, in which the task computes its losses",)
    assert compare_strategies(Narrowed(), perceptron_data(), [], steps=1, tolerance=1e-9).tolerance == 1e-9
    named = {"precision": "fp64"}
    assert compare_strategies(Narrowed(), perceptron_data(), [], steps=1, trainer=named).tolerance == 1e-11

    class Wrong(Narrowed):
        reduction = "sum"

    report = compare_strategies(Wrong(lr=0.01), perceptron_data(), ["dp", Corrupting(device="cpu")], steps=4)
    assert [row.verdict for row in report.rows[1:]] == ["different"] * 2


def test_a_difference_beyond_fp32_rounding_is_found_where_losses_are_of_fp32():
    class Coarse(Perceptron):
        """Rounds its loss to about 1e-6."""

        def training_step(self, batch):
            return (functional.mse_loss(self.network(batch[0]), batch[1]) + 10).float() - 10

    report = compare_strategies(Coarse(), perceptron_data(28), ["dp", Corrupting(device="cpu")], steps=4)
    assert 1e-7 < report.rows[1].loss.value < report.tolerance == 1e-5
    assert report.rows[2].verdict == "different"


def test_phases_that_convert_their_losses_to_fp32_have_the_tolerance_of_fp32_also_with_skipped_steps():
    class Narrow(Duel):
        def first_step(self, batch):
            return super().first_step(batch).float()

        last_step = first_step

    assert compare_strategies(Narrow(), perceptron_data(), [], steps=3).tolerance == 1e-5


def test_a_wrong_gradient_is_not_taken_for_rounding_under_an_optimizer_that_enlarges_it():
    class Adaptive(Perceptron):
        def configure_optimizers(self):
            return torch.optim.Adam(self.parameters(), lr=0.1, eps=1e-30)

    wrong = [Corrupting(device="cpu")]
    report = compare_strategies(Adaptive(), perceptron_data(), wrong, steps=4, trainer={"precision": "fp32"})
    assert report.rows[1].verdict == "different"


# ---- What is shown


def test_the_report_is_a_table_and_json():
    report = compare_strategies(ConvNet(), Data(train=images(24), batch_size=8), ["dp"], steps=2)
    lines = report.as_table().splitlines()
    assert lines[0].split() == [*("strategy", "layout", "loss", "gradient", "weights", "ms/step", "MB/step", "verdict")]
    assert max(map(len, lines[:4])) <= 80
    assert [line.split()[0] for line in lines[2:4]] == ["single", "dp"]
    assert lines[4].startswith("not equal: 2 steps in fp64") and lines[6].startswith("dp: step 1: ")
    worst = max(report.rows[1].weights, report.rows[1].grad_norm, report.rows[1].loss, key=lambda one: one.value)
    assert lines[5].startswith(f"dp: the largest difference is that of {worst.parameter}")
    assert lines[5].endswith(f" in step {worst.step}")
    read = json.loads(report.as_json())
    assert read["rows"][1]["weights"]["parameter"] == report.rows[1].weights.parameter and read["is_equal"] is False


def test_the_command_prints_the_table_and_returns_1_for_a_difference(capsys):
    typed = ["recipe=digits_mlp", "task.width=8", "strategies=[single,dp]", "steps=2", "data.num_train=100"]
    assert parity(Arguments("parity", list(typed))) == 0
    assert "all equal: 2 steps" in capsys.readouterr().out
    assert main(["parity", *typed, "tolerance=1e-30", "json=true"]) == 1
    assert json.loads(capsys.readouterr().out)["is_equal"] is False


@pytest.mark.parametrize(
    ("typed", "precision"),
    [
        ([], "fp64, tolerance 1e-08"),
        (["trainer.precision=fp32"], "fp32, tolerance 1e-05"),
        (["trainer.precision=fp64"], "fp64, tolerance 1e-11"),
    ],
)
def test_the_command_compares_in_the_precision_that_is_typed(typed, precision, capsys):
    assert main(["parity", "recipe=digits_mlp", "strategies=[single]", "steps=1", "data.num_train=64", *typed]) == 0
    assert f"all equal: 1 steps in {precision} " in capsys.readouterr().out


@pytest.mark.slow
def test_the_command_compares_all_strategies_in_separate_processes(capsys):
    names = "single,dp,ddp,torch_ddp,fusion,fsdp,pipeline"
    assert main(["parity", "recipe=digits", f"strategies=[{names}]", "steps=3", "devices=2"]) == 0
    lines = capsys.readouterr().out.splitlines()
    head = next(place for place, line in enumerate(lines) if line.startswith("strategy "))
    assert re.split(" {2,}", lines[head]) == [
        *("strategy", "layout", "loss", "gradient", "weights", "ms/step", "MB/step", "verdict")
    ]
    rows = [re.split(" {2,}", line) for line in lines[head + 2 : head + 9]]
    assert [row[0] for row in rows] == names.split(",")
    assert [row[1] for row in rows] == ["1 x 1 x 64", "1 x 2 x 32", *["2 x 1 x 32"] * 4, "1 x 4 x 16"]
    assert [row[-1] for row in rows] == ["reference", *["equal"] * 6]
    for row in rows[1:]:
        loss, norm, weights = map(float, row[2:5])
        assert max(loss, norm) < 1e-11 and 0 < weights < 1e-11
        assert float(row[5]) > 0
    assert max(map(len, lines[head : head + 9])) <= 80
    sent = {row[0]: float(row[6]) for row in rows if row[0] in ("ddp", "torch_ddp", "fusion")}
    assert sent["ddp"] == sent["torch_ddp"] == pytest.approx(sent["fusion"], rel=0.1) != 0
    assert lines[head + 9].startswith("all equal: 3 steps in fp64, tolerance 1e-08 relative to single")


def test_a_stopped_command_prints_a_message(capsys, monkeypatch):
    def interrupted(*arguments, **settings):
        raise Stopped("SIGINT", 130)

    monkeypatch.setattr("trainkit.parity.compare.compare_strategies", interrupted)
    with pytest.raises(Stopped):
        main(["parity", "recipe=digits_mlp", "steps=1"])
    assert "stopped by SIGINT; the comparison is incomplete" in capsys.readouterr().err


def test_json_has_null_for_nan():
    class Failing(SingleStrategy):
        def forward_backward(self, task, step_batch):
            raise RuntimeError("no such luck")

    report = compare_strategies(Perceptron(), perceptron_data(), [Failing(device="cpu")], steps=1)

    def refuse(word):
        raise AssertionError(f"{word} is not JSON")

    row = json.loads(report.as_json(), parse_constant=refuse)["rows"][1]
    assert row["seconds_a_step"] is None and row["verdict"] == "failed"


def test_the_step_of_a_nan_is_shown():
    row = ParityRow("x", "different", loss=Difference(math.nan, 3), weights=Difference(0.1, 5, "w"))
    assert "step 3" in ParityReport((row,), 6, "fp32", 1e-5).as_table()


def test_norms_that_overflow_to_the_same_infinity_are_equal():
    assert _numbers(math.inf, math.inf, scale=math.inf, step=1, phase="").value == 0.0
    assert _numbers(math.inf, 1.0, scale=1.0, step=1, phase="").value == math.inf


def test_two_strategies_of_one_class_have_a_row_each():
    halves, thirds = (DataParallelStrategy(devices=["cpu"] * count) for count in (2, 3))
    report = compare_strategies(Perceptron(), perceptron_data(), [halves, thirds, "dp"], steps=1)
    assert [row.strategy for row in report.rows] == ["single", "DataParallelStrategy", "DataParallelStrategy 2", "dp"]
    assert report.is_equal


@pytest.mark.parametrize(
    ("typed", "message"),
    [
        ("steps=many", "steps=many is invalid; type for example steps=20"),
        ("json=perhaps", "json=perhaps is invalid; type for example json=true"),
        ("strategies=[single,,dp]", r"type strategies=\[single,dp,ddp\]"),
        ("steps=0", "steps must be a whole number, at least 1"),
        ("stepz=3", "stepz: unknown key. Did you mean 'steps'"),
        ("strategy=ddp", r"strategy=ddp: .* type strategies=\[single,ddp\]"),
        ("strategy.devices=3", "strategy.devices: .* type devices="),
        ("strategy.comm_hook=power_sgd", "strategy.comm_hook: unknown key; none of dp has it"),
        ("strategy.acumulate=2", "Did you mean 'accumulate'"),
        ("strategy.accumulate=many", "strategy.accumulate: 'many' is text"),
    ],
)
def test_a_wrong_argument_is_reported_with_what_to_type(typed, message):
    strategies = [] if typed.startswith("strategies") else ["strategies=[dp]"]
    with pytest.raises(UserError, match=message):
        parity(Arguments("parity", ["recipe=digits_mlp", *strategies, typed]))


def test_settings_of_strategies_go_to_those_that_have_them(capsys):
    typed = [
        "recipe=digits_mlp",
        "task.width=8",
        "strategies=[single,dp]",
        "steps=1",
        "data.num_train=100",
        "json=true",
    ]
    assert main(["parity", *typed, "strategy.accumulate=2", "devices=4"]) == 0
    assert [row["layout"] for row in json.loads(capsys.readouterr().out)["rows"]] == ["1 x 1 x 64", "1 x 8 x 8"]


def test_devices_are_ranks_replicas_or_stages_of_strategies_that_are_named():
    assert make_strategy("ddp", 3, "cpu").num_ranks() == make_strategy("fusion", 3, "cpu").num_ranks() == 3
    assert make_strategy("dp", 3, "cpu").devices == 3 * [torch.device("cpu")]
    assert make_strategy("pipeline", 3, "cpu").mesh.stages == 3
    assert make_strategy(("pipeline", {"stages": 2}), 3, "cpu").mesh.stages == 2
    assert (
        make_strategy("ddp", 2, "cpu").comm_hook
        == "none"
        != make_strategy(("ddp", {"comm_hook": "power_sgd"}), 2, "cpu").comm_hook
    )


# ---- Helpers for tests


def test_assert_strategies_equal_shows_the_table_and_the_cause():
    assert assert_strategies_equal(Perceptron(), perceptron_data(), ["dp"]).is_equal
    with pytest.raises(AssertionError, match=r"(?s)do not agree.*dp .*different.*BatchNorm2d"):
        assert_strategies_equal(ConvNet(), Data(train=images(24), batch_size=8), ["dp"])


class Dropping(Perceptron):
    def training_step(self, batch):
        return functional.mse_loss(self.network(functional.dropout(batch[0], 0.3)), batch[1])


@pytest.mark.parametrize("strategy", ["single", DataParallelStrategy(devices=["cpu"] * 3)])
def test_assert_resume_exact_accepts_a_task_whose_random_numbers_are_saved(strategy):
    assert_resume_exact(Dropping(), perceptron_data(), strategy)


def test_assert_resume_exact_finds_state_that_is_not_saved():
    class Hidden(Perceptron):
        calls = 0.0  # of this object; a resumed run begins with 0 again

        def training_step(self, batch):
            self.calls += 1
            return super().training_step(batch)["loss"] * self.calls

    with pytest.raises(AssertionError, match=r"network.* differs by .*stopped after 3"):
        assert_resume_exact(Hidden(lr=1e-3), perceptron_data())


class WithExtraState(Perceptron):
    """Counts its steps in an extra state, and learns from it."""

    restores = True

    def __init__(self):
        super().__init__(lr=1e-3)
        self.steps = {"taken": 0, "shown": torch.zeros(2)}

    def get_extra_state(self):
        return self.steps

    def set_extra_state(self, state):
        if self.restores:
            self.steps = state

    def training_step(self, batch):
        self.steps = {"taken": self.steps["taken"] + 1, "shown": self.steps["shown"] + 1}
        return super().training_step(batch)["loss"]


def test_an_extra_state_is_compared_after_a_resume():
    assert_resume_exact(WithExtraState(), perceptron_data())

    class Forgets(WithExtraState):
        restores = False

    with pytest.raises(AssertionError, match=r"_extra_state differs \(3 in place of 6\)"):
        assert_resume_exact(Forgets(), perceptron_data())


def test_tasks_with_an_extra_state_are_compared_between_strategies():
    assert compare_strategies(WithExtraState(), perceptron_data(), ["ddp"], steps=3).is_equal


def test_assert_resume_exact_evaluates_where_it_is_asked_to():
    class Learns(Perceptron):
        evaluations = 0.0  # of this object, and a sanity batch of a resumed run is none

        def validation_step(self, batch):
            self.evaluations += 1
            return super().validation_step(batch)

        def training_step(self, batch):
            return super().training_step(batch)["loss"] * (1 + self.evaluations)

    data = perceptron_data()
    data = Data(train=data.dataset("train"), validation=data.dataset("train"), batch_size=8)
    assert_resume_exact(Learns(), data)
    with pytest.raises(AssertionError, match="stopped after 3"):
        assert_resume_exact(Learns(), data, trainer={"evaluate_every": "2step"})


# ---- All strategies, tasks and layouts at once


class WholeWeights(Callback):
    """Keeps the whole task's weights after every step, on rank 0."""

    def __init__(self):
        self.steps = []

    def on_step_end(self, run):
        weights = run.strategy.state_dict(run.task)  # collective; whole on rank 0
        if run.strategy.comm.rank == 0:
            self.steps.append({name: tensor.detach().cpu().clone() for name, tensor in weights.items()})


def trained(strategy, name, *, num_samples, run_dir):
    """Return the weights after each of four steps; a global batch is 12 samples."""
    task, data = make(name, num_samples, batch_size=12)
    seen = WholeWeights()
    # With 25 samples the last step comes after the short batch.
    fit(strategy, task, data, seen, max_duration="4step", evaluate_every=None, run_dir=run_dir)
    return seen.steps


def strategies_of(num_ranks, accumulate):
    """Return a new object of each strategy, on as many ranks, stages or devices."""
    return {
        "ddp": DDPStrategy(device="cpu", accumulate=accumulate),
        "torch_ddp": TorchDDPStrategy(device="cpu", accumulate=accumulate),
        "fusion": FusionStrategy(device="cpu", accumulate=accumulate),
        "fusion sharded": FusionStrategy(device="cpu", accumulate=accumulate, shard_optimizer=True),
        "fsdp": FSDPStrategy(device="cpu", accumulate=accumulate, min_unit_mb=0.0),
        "pipeline": PipelineStrategy(device="cpu", accumulate=accumulate, stages=num_ranks),
    }


def largest_differences(run_dir, lengths):
    """Run on each rank: every strategy on every task, accumulation and length of the last batch, against `single`."""
    rank, num_ranks, found = torch.distributed.get_rank(), torch.distributed.get_world_size(), {}
    for name, num_samples in itertools.product(("perceptron", "plain_conv_net", "gpt"), lengths):
        run = partial(trained, name=name, num_samples=num_samples)
        single = run(SingleStrategy(device="cpu"), run_dir=run_dir / "alone") if rank == 0 else None
        for accumulate in (1, 3):
            strategies = strategies_of(num_ranks, accumulate)
            steps = {kind: run(made, run_dir=run_dir / "several") for kind, made in strategies.items()}
            if rank == 0:
                dp = DataParallelStrategy(devices=["cpu"] * num_ranks, accumulate=accumulate)
                steps["dp"] = run(dp, run_dir=run_dir / "dp")
                for kind, ours in steps.items():
                    found[f"{kind} {name} {num_samples} {accumulate}"] = largest_difference(ours, single)
    return found


@pytest.mark.slow
@pytest.mark.parametrize("num_ranks", [1, pytest.param(2, marks=in_make_zoo), 3])
def test_every_strategy_has_the_weights_of_single_on_every_task_and_layout(num_ranks, tmp_path):
    # 25 samples: the last batch has a single one, so that ranks are without; on two ranks also a whole one.
    lengths = (24, 25) if num_ranks == 2 else (25,)
    found, *_ = run_ranks(largest_differences, num_ranks, tmp_path, lengths, timeout=200)
    assert len(found) == 7 * 3 * 2 * len(lengths)
    assert {key: value for key, value in found.items() if not value <= 1e-6} == {}


def bytes_of_strategies(run_dir):
    """Return the bytes that a rank reports to send in a step, by strategy."""
    found = {}
    for strategy in (DDPStrategy(device="cpu"), TorchDDPStrategy(device="cpu"), FusionStrategy(device="cpu")):
        counted = EachStep(lambda run: run.strategy.bytes_a_step)
        fit(strategy, Perceptron(), perceptron_data(), counted, max_duration="1step", run_dir=run_dir)
        found[type(strategy).__name__] = counted.seen[-1]
    return found


def test_strategies_that_reduce_all_gradients_report_the_bytes_they_send(tmp_path):
    whole = sum(parameter.nbytes for parameter in Perceptron().parameters())
    for found in run_ranks(bytes_of_strategies, 3, tmp_path):
        assert found["DDPStrategy"] == found["TorchDDPStrategy"] == 2 * 2 * whole // 3
        assert found["FusionStrategy"] == pytest.approx(2 * 2 / 3 * whole, rel=0.2)  # parts begin at cache lines


def test_the_tasks_cover_a_perceptron_a_convolutional_net_and_a_gpt():
    assert {"perceptron", "plain_conv_net", "gpt"} <= set(TASKS)
