"""Communication hooks by name: built-in hooks with options, PyTorch's by import path, and rejected settings."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.utils.data import TensorDataset
from trainkit.strategies.ddp import DDPStrategy
from trainkit.strategies.ddp.comm_hooks import PowerSGD, make_comm_hook

from tests.tasks import Fitting, fit, flat, seeded
from trainkit import Data, UserError
from trainkit.testing import run_ranks

UPSTREAM = "torch.distributed.algorithms.ddp_comm_hooks"


def chosen(**settings: Any) -> Any:
    strategy = DDPStrategy(device="cpu", **settings)
    return None if strategy._hook is None else strategy._hook.state(None)


def test_options_reach_the_state_of_our_hook():
    assert chosen() is None
    for options, expected in ((None, (2, 10)), ({"rank": 4, "start_step": 0}, (4, 0))):
        power = chosen(comm_hook="power_sgd", comm_hook_options=options)
        assert isinstance(power, PowerSGD) and (power.rank, power.start_step) == expected


def test_a_hook_may_be_an_import_path_with_a_state_or_a_function():
    path = make_comm_hook(f"{UPSTREAM}.default_hooks.fp16_compress_hook", state=None, options=None)
    assert path.hook is default_hooks.fp16_compress_hook
    assert make_comm_hook(default_hooks.allreduce_hook, state=None, options=None).hook is default_hooks.allreduce_hook
    choice = make_comm_hook(
        f"{UPSTREAM}.powerSGD_hook.powerSGD_hook",
        state=f"{UPSTREAM}.powerSGD_hook.PowerSGDState",
        options={"matrix_approximation_rank": 3},
    )
    state = choice.state(None)
    assert isinstance(state, powerSGD_hook.PowerSGDState) and state.matrix_approximation_rank == 3


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"comm_hook": "power_sdg"}, r"'power_sdg' is unknown\. Did you mean 'power_sgd'\?.*or the import path"),
        ({"comm_hook": "fp16"}, r"comm_hook=fp16 is the setting reduce_dtype; type strategy\.reduce_dtype=fp16\."),
        (
            {"comm_hook": "power_sgd", "reduce_dtype": "bf16"},
            r"comm_hook=power_sgd sends gradients itself, .*comm_hook=none or strategy\.reduce_dtype=null",
        ),
        (
            {"comm_hook": "torch.nowhere.hook"},
            "comm_hook=torch.nowhere.hook cannot be imported: No module named 'torch.nowhere'",
        ),
        ({"comm_hook": f"{UPSTREAM}.default_hooks.allredcue_hook"}, "Did you mean 'allreduce_hook'"),
        ({"comm_hook": "torch.pi"}, "must be a function or its import path"),
        (
            {"comm_hook": "power_sgd", "comm_hook_options": {"rnak": 2}},
            r"no 'rnak'\. Did you mean 'rank'\? Valid options: rank, start",
        ),
        ({"comm_hook": "none", "comm_hook_options": {"rank": 2}}, "This hook has no options"),
        (
            {"comm_hook": "power_sgd", "comm_hook_options": {"rank": 0}},
            "rank must be a whole number, at least 1, got 0",
        ),
        ({"comm_hook": "power_sgd", "comm_hook_options": {"rank": 2.5}}, "rank must be a whole number"),
        ({"comm_hook": "power_sgd", "comm_hook_state": "torch.nn.Linear"}, "Omit comm_hook_state"),
        (
            {"comm_hook": f"{UPSTREAM}.default_hooks.fp16_compress_hook", "comm_hook_options": {"a": 1}},
            "belong to power_sgd",
        ),
        (
            {
                "comm_hook": f"{UPSTREAM}.powerSGD_hook.powerSGD_hook",
                "comm_hook_state": f"{UPSTREAM}.powerSGD_hook.PowerSGDState",
                "comm_hook_options": {"matrix_approximation_rnak": 3},
            },
            "Did you mean 'matrix_approximation_rank'",
        ),
    ],
)
def test_wrong_hook_settings_are_rejected_with_the_valid_ones(settings, message):
    with pytest.raises(UserError, match=message):
        DDPStrategy(**settings)


def task(kind: type[Fitting] = Fitting) -> Fitting:
    return kind(seeded(lambda: nn.Sequential(nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 1))))


HOOKS: dict[str, dict[str, Any]] = {
    "none": {},
    "theirs, mean": {"comm_hook": f"{UPSTREAM}.default_hooks.allreduce_hook"},
    "theirs, fp16": {"comm_hook": f"{UPSTREAM}.default_hooks.fp16_compress_hook"},
    "ours": {"comm_hook": "power_sgd", "comm_hook_options": {"rank": 1, "start_step": 2}},
}


def weights_with_hooks(folder: str) -> dict[str, Tensor]:
    """Return the weights after training with each hook, in buckets of at most 2 KiB."""
    x = torch.randn(240, 32, generator=torch.Generator().manual_seed(1))
    found = {}
    for name, settings in HOOKS.items():
        trained = task()
        strategy = DDPStrategy(device="cpu", bucket_cap_mb=0.002, **settings)
        data = Data(train=TensorDataset(x), batch_size=16)
        fit(strategy, trained, data, max_duration="15step", run_dir=f"{folder}/{name}")
        found[name] = flat(trained)
    return found


@pytest.mark.slow
def test_the_strategy_trains_with_each_hook_to_nearly_the_same_weights(tmp_path):
    first, second = run_ranks(weights_with_hooks, 2, str(tmp_path))
    plain = first["none"]
    for name, weights in first.items():
        assert torch.equal(weights, second[name]), f"ranks differ with {name}"
        distance = (weights - plain).norm() / plain.norm()
        assert distance < (1e-2 if name == "ours" else 1e-3), name
        assert name in ("none", "theirs, mean") or distance > 0, f"{name} has changed nothing"
    assert (first["theirs, mean"] - plain).abs().max() < 1e-6


class Weighted(Fitting):
    def training_step(self, batch: list[Tensor]) -> Any:
        return {"loss": super().training_step(batch), "weight": batch[0].abs().sum()}


def test_what_power_sgd_loses_is_not_kept_for_a_step_with_other_weights(tmp_path):
    strategy = DDPStrategy(device="cpu", devices=1, comm_hook="power_sgd")
    data = Data(train=TensorDataset(torch.ones(4, 32)), batch_size=2)
    with pytest.raises(UserError, match=r"the sum of the weights that training_step .* Set strategy\.comm_hook=none"):
        fit(strategy, task(Weighted), data, max_duration="2step", run_dir=tmp_path)
