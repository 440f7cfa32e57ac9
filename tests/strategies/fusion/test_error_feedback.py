"""Error feedback of fusion: what rounding loses is sent later, kept in checkpoints, and never applied elsewhere."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch.utils.data import TensorDataset
from trainkit.strategies.ddp import DDPStrategy
from trainkit.strategies.fusion.strategy import FusionStrategy

from tests.strategies.fusion.training import SMALL_BUFFER, STOP, Drift, drifted, exact_weights, train
from tests.tasks import StopAt
from trainkit import Data, UserError
from trainkit.testing import run_ranks

FEEDBACK = {"device": "cpu", "reduce_dtype": "bf16", "error_feedback": True, "buffer_mb": SMALL_BUFFER}


class Hosts(FusionStrategy):
    """Treats every two ranks as a host."""

    def host(self):
        return f"host {self.comm.rank // 2}"


ARRANGEMENTS = {
    2: {
        "shared memory": (FusionStrategy, {"transport": "shared_memory"}),
        "shared memory, sharded": (FusionStrategy, {"transport": "shared_memory", "shard_optimizer": True}),
        "exchange, fp16": (FusionStrategy, {"transport": "exchange", "reduce_dtype": "fp16"}),
        "exchange, thread": (FusionStrategy, {"transport": "exchange", "communication_thread": True}),
        "exchange, sharded": (FusionStrategy, {"transport": "exchange", "shard_optimizer": True, "max_in_flight": 1}),
    },
    4: {
        "exchange": (FusionStrategy, {"transport": "exchange"}),
        "exchange, sharded": (FusionStrategy, {"transport": "exchange", "shard_optimizer": True}),
        "hosts": (Hosts, {}),
        "hosts, sharded": (Hosts, {"shard_optimizer": True}),
        "one server per host": (Hosts, {"servers": "host", "communication_thread": False}),
    },
}


def weights_and_errors(run_dir, exact):
    """Return by arrangement the distances from exact weights, with and without the last errors."""
    found = {}
    for name, (kind, settings) in ARRANGEMENTS[dist.get_world_size()].items():
        weights, errors = drifted(kind(**FEEDBACK | settings), run_dir / name)
        found[name] = [(w - exact).abs().max().item() for w in (weights, weights - errors.last)]
    return found


@pytest.mark.parametrize("num_ranks", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_all_that_was_applied_is_the_sum_of_gradients_but_for_the_last_errors(num_ranks, tmp_path):
    exact = exact_weights(tmp_path / "single")
    for found in run_ranks(weights_and_errors, num_ranks, tmp_path, exact):
        assert len(found) == len(ARRANGEMENTS[num_ranks])
        for name, (distance, without_errors) in found.items():
            assert distance > 1e-5, f"{name}: something is left to send"
            assert without_errors < 1e-6, name


def distances_from_exact(run_dir, exact):
    """Return the distances from exact weights with error feedback and without it."""
    both = [FusionStrategy(**FEEDBACK | {"error_feedback": feedback}) for feedback in (True, False)]
    return [(drifted(strategy, run_dir)[0] - exact).norm().item() for strategy in both]


def test_with_error_feedback_weights_are_nearer_to_those_of_one_device(tmp_path):
    exact = exact_weights(tmp_path / "single")
    for with_feedback, without in run_ranks(distances_from_exact, 2, tmp_path / "fusion", exact):
        assert 0 < with_feedback < without / 2


# ---- Checkpoints


def resumed_and_whole(run_dir):
    """Return the last weights of a resumed and of a whole run in fp32, by arrangement."""
    found = {}
    for name in ("shared memory", "exchange, thread", "exchange, sharded"):
        kind, settings = ARRANGEMENTS[2][name]
        whole, _ = drifted(kind(**FEEDBACK | settings), run_dir / name / "whole", precision="fp32")
        part = run_dir / name / "part"
        drifted(kind(**FEEDBACK | settings), part, StopAt(STOP), precision="fp32")
        resumed, _ = drifted(kind(**FEEDBACK | settings), part, resume=part, precision="fp32")
        found[name] = resumed, whole
    return found


@pytest.mark.slow
def test_a_resumed_run_is_equal_to_the_bit(tmp_path):
    for found in run_ranks(resumed_and_whole, 2, tmp_path):
        for name, (resumed, whole) in found.items():
            assert torch.equal(resumed, whole), name


def saved_errors(run_dir):
    return drifted(FusionStrategy(**FEEDBACK, transport="exchange"), run_dir, StopAt(STOP))[1].saved


def resumed_elsewhere(saved, run_dir):
    """Return by strategy the first errors, and the last weights without the last errors."""
    hook = {"reduce_dtype": "bf16", "error_feedback": True}
    found = {}
    for name, strategy in (
        ("fusion", FusionStrategy(**FEEDBACK | {"buffer_mb": 4.0})),
        ("ddp", DDPStrategy(device="cpu", **hook)),
    ):
        weights, errors = drifted(strategy, run_dir / name, resume=saved)
        found[name] = errors.first, weights - errors.last
    return found


@pytest.mark.slow
def test_on_other_ranks_buffers_and_strategies_the_sum_of_errors_is_kept_by_parameter(tmp_path):
    exact, saved = exact_weights(tmp_path / "single"), tmp_path / "saved"
    before, _ = run_ranks(saved_errors, 2, saved)
    assert before.abs().max() > 1e-5
    resumed = run_ranks(resumed_elsewhere, 3, saved, tmp_path)
    alone = run_ranks(resumed_elsewhere, 1, saved, tmp_path / "alone")
    for found in resumed[0], alone[0]:
        for first, applied in found.values():
            torch.testing.assert_close(first, before)
            torch.testing.assert_close(applied, exact, rtol=0, atol=1e-6)


# ---- Gradients that overflow


class Overflowing(Drift):
    """Its gradients are finite, but those of rank 1 are above 65504 in the third step."""

    def training_step(self, batch):
        self.calls = getattr(self, "calls", 0) + 1
        return super().training_step(batch) * (1e6 if self.calls == 3 and dist.get_rank() == 1 else 1.0)


class TooLargeInSum(Drift):
    """The gradients of each rank are below 65504, but their sum is not."""

    def training_step(self, batch):
        return super().training_step(batch) * 8e4


def train_in_fp16(task, run_dir, *callbacks, on_nonfinite="raise", **settings):
    """Return the weights of every step with gradients sent in fp16."""
    strategy = FusionStrategy(device="cpu", reduce_dtype="fp16", buffer_mb=SMALL_BUFFER, **settings)
    data = Data(train=TensorDataset(torch.ones(12, 307)), batch_size=4)
    train(strategy, task, data, *callbacks, run_dir=run_dir, steps=6, on_nonfinite=on_nonfinite)
    return torch.cat([task.long, task.short]).detach()


def overflowed(run_dir):
    """Return the errors of runs with on_nonfinite=raise, and the weights of those that skip."""
    messages, weights = [], []
    for number, transport in enumerate(("shared_memory", "exchange")):
        for feedback in (False, True):
            settings = {"transport": transport, "error_feedback": feedback}
            case = run_dir / f"{number} {feedback}"
            with pytest.raises(Exception, match="not finite") as caught:
                train_in_fp16(Overflowing(), case / "raise", **settings)
            messages.append(str(caught.value))
            with pytest.raises(Exception, match="not finite") as caught:
                train_in_fp16(TooLargeInSum(), case / "sum", **settings)
            messages.append(str(caught.value))
            weights.append(train_in_fp16(Overflowing(), case / "skip", on_nonfinite="skip", **settings))
    weights.append(train_in_fp16(TooLargeInSum(), run_dir / "sharded", shard_optimizer=True) / 8e4 + 1.0)
    return messages, weights


@pytest.mark.slow
def test_gradients_that_overflow_in_fp16_are_not_finite_and_leave_no_error(tmp_path):
    for messages, weights in run_ranks(overflowed, 2, tmp_path):
        assert len(messages) == 8 and all("long" in message for message in messages)
        for last in weights:  # five of six steps; sharded, a sum stays in fp32
            torch.testing.assert_close(last, torch.full((307,), -5.0))


# ---- Refused combinations


@pytest.mark.parametrize("kind", [FusionStrategy, DDPStrategy])
@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"reduce_dtype": "bf61"}, "reduce_dtype='bf61' is unknown. Did you mean 'bf16'. Choose null, bf16 or fp16"),
        ({"error_feedback": True}, "reduce_dtype=null rounds nothing. Set strategy.reduce_dtype=bf16"),
        ({"error_feedback": "yes", "reduce_dtype": "bf16"}, "error_feedback must be true or false, got 'yes'"),
        (
            {"error_feedback": True, "reduce_dtype": "fp16", "micro_batch_size": "auto"},
            "micro_batch_size=auto repeats a step .* give strategy.micro_batch_size as a number",
        ),
    ],
)
def test_settings_that_exclude_each_other_are_refused(kind, settings, message):
    with pytest.raises(UserError, match=message):
        kind(**settings)


class Weighted(Drift):
    """Returns the weight of its samples."""

    def training_step(self, batch):
        return {"loss": super().training_step(batch), "weight": batch[0].sum()}


@pytest.mark.parametrize(
    ("strategy", "setting"),
    [
        (FusionStrategy(**FEEDBACK, devices=1), "strategy.error_feedback=false"),
        (
            DDPStrategy(device="cpu", devices=1, reduce_dtype="bf16", error_feedback=True),
            "strategy.error_feedback=false",
        ),
        (DDPStrategy(device="cpu", devices=1, comm_hook="power_sgd"), "strategy.comm_hook=none"),
    ],
)
def test_what_a_step_loses_is_not_kept_for_a_step_with_other_weights(strategy, setting, tmp_path):
    data = Data(train=TensorDataset(torch.ones(4, 307)), batch_size=2)
    with pytest.raises(UserError, match=f"the sum of the weights that training_step returned .* Set {setting}"):
        train(strategy, Weighted(), data, run_dir=tmp_path)


class Evaluated(Drift):
    def configure_optimizers(self):
        return torch.optim.LBFGS(self.parameters())


@pytest.mark.parametrize(
    ("settings", "task", "of_trainer", "message"),
    [
        ({}, Evaluated, {}, "LBFGS compares the exact gradients .* strategy.error_feedback=false"),
        ({}, Drift, {"precision": "bf16-true"}, "does not work for gradients of torch.bfloat16, .*bf16-mixed"),
        (
            {"reduce_dtype": "fp16", "error_feedback": False},
            Drift,
            {"max_grad_value": 1.0},
            "max_grad_value would make finite gradients .* strategy.reduce_dtype=bf16",
        ),
    ],
)
def test_tasks_and_trainers_that_cannot_work_are_refused_before_training(settings, task, of_trainer, message, tmp_path):
    for kind in (FusionStrategy, DDPStrategy):
        strategy = kind(**{"device": "cpu", "reduce_dtype": "bf16", "error_feedback": True} | settings, devices=1)
        with pytest.raises(UserError, match=message):
            data = Data(train=TensorDataset(torch.ones(4, 307)), batch_size=2)
            train(strategy, task(), data, run_dir=tmp_path / kind.__name__, **of_trainer)
