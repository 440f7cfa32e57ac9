"""State of communication hooks in checkpoints: a resumed run is equal to the bit with one that was not interrupted."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import TensorDataset
from trainkit.strategies.ddp import DDPStrategy
from trainkit.strategies.ddp.comm_hooks import average_hook
from trainkit.strategies.reducer.bucket import GradBucket
from trainkit.strategies.transports.process_group import HookSteps

from tests.marks import gpus
from tests.tasks import Fitting, adamw, fit, flat, seeded
from trainkit import Callback, Data
from trainkit.checkpoint.store import load_from
from trainkit.distributed.collectives import Collectives, gather
from trainkit.parity.trials import StopAfterStep
from trainkit.testing import run_ranks

STEPS, STOP = 11, 6


class Sines(Fitting):
    def training_step(self, batch: list[Tensor]) -> Tensor:
        return super().training_step([batch[0], batch[0].sin()])


def sines() -> Sines:
    return Sines(seeded(lambda: nn.Sequential(nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 32))), adamw)


class Momentum:
    """State of `momentum_hook`: this rank's gradients so far."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group = group
        self.sums: dict[str, Tensor] = {}

    def state_dict(self) -> dict[str, Any]:
        return {"sums": self.sums}

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        self.sums = saved["sums"]


def momentum_hook(state: Momentum, bucket: GradBucket) -> HookSteps:
    buffer, name = bucket.buffer(), str(bucket.index())
    own = state.sums.get(name, torch.zeros_like(buffer)).to(buffer.device) * 0.5 + buffer * (dist.get_rank() + 1)
    state.sums[name] = own
    buffer.copy_(own)
    return (yield from average_hook(state.group, bucket))


class Unsaved:
    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group = group


def unsaved_hook(state: Unsaved, bucket: GradBucket) -> HookSteps:
    return average_hook(state.group, bucket)


SAVED: dict[str, dict[str, Any]] = {
    "power_sgd": {"comm_hook": "power_sgd", "comm_hook_options": {"rank": 2, "start_step": 3}},
    "custom": {"comm_hook": momentum_hook, "comm_hook_state": Momentum},
}
HOOKS = {**SAVED, "none": {}, "unsaved": {"comm_hook": unsaved_hook, "comm_hook_state": Unsaved}}


class Notes(Callback):
    """Keeps the hook's states at the start on rank 0, and this rank's weights at the end."""

    def on_fit_start(self, run: Any) -> None:
        self.states = run.strategy.strategy_state().get("hook_states")

    def on_fit_end(self, run: Any) -> None:
        self.weights = flat(run.task).cpu()


def train(
    folder: str, name: str, *, more: Sequence[Callback] = (), resume: str | None = None, device: str = "cpu"
) -> Notes:
    notes, x = Notes(), torch.randn(240, 32, generator=torch.Generator().manual_seed(1))
    strategy = DDPStrategy(device=device, bucket_cap_mb=0.003, **HOOKS[name])
    data, settings = Data(train=TensorDataset(x), batch_size=12), {"run_dir": f"{folder}/{name}", "resume": resume}
    fit(strategy, sines(), data, notes, *more, max_duration=f"{STEPS}step", **settings)
    return notes


def resumed_and_whole(folder: str, device: str) -> dict[str, tuple[Tensor, Tensor, bool]]:
    """Return by hook this rank's last weights of a resumed and of a whole run, and if ranks differ in them."""
    found = {}
    for name in SAVED:
        whole = train(f"{folder}/whole", name, device=device).weights
        train(f"{folder}/part", name, more=[StopAfterStep(STOP)], device=device)
        resumed = train(f"{folder}/part", name, resume=f"{folder}/part/{name}", device=device).weights
        ranks = gather(whole, dist.group.WORLD)
        found[name] = resumed, whole, any(not torch.equal(ranks[0], other) for other in ranks)
    return found


ON_CUDA = gpus()


@pytest.mark.parametrize("device", [pytest.param("cpu", marks=pytest.mark.slow), pytest.param("cuda", marks=ON_CUDA)])
def test_a_resumed_run_continues_to_the_bit_with_the_state_of_each_rank(device, tmp_path):
    for rank in run_ranks(resumed_and_whole, 2, str(tmp_path), device):
        for name, (resumed, whole, differ) in rank.items():
            assert torch.equal(resumed, whole), name
            assert not differ, name


def save(folder: str) -> None:
    for name in SAVED:
        train(folder, name, more=[StopAfterStep(STOP)])


def states_of_resumed_runs(folder: str) -> dict[str, Any]:
    """Return by hook its states on rank 0 before the first step."""
    return {name: train(folder, name, resume=f"{folder}/{name}").states for name in SAVED}


@pytest.mark.slow
def test_on_another_number_of_ranks_the_sum_of_errors_is_kept_and_other_state_begins_anew(tmp_path):
    run_ranks(save, 3, str(tmp_path))
    resumed = run_ranks(states_of_resumed_runs, 2, str(tmp_path))[0]
    assert resumed["custom"] == [{"hooks": {"": {"sums": {}}}}] * 2
    saved = load_from(tmp_path / "power_sgd", Collectives()).payload["strategy"]["hook_states"]
    assert len(saved) == 3 and len(resumed["power_sgd"]) == 2
    old, new = ([state["hooks"][""]["errors"] for state in states] for states in (saved, resumed["power_sgd"]))
    for key in old[0]:
        assert torch.equal(new[0][key], new[1][key])
        torch.testing.assert_close(new[0][key] + new[1][key], sum(errors[key] for errors in old))
    assert any(error.any() for error in new[0].values())


def warnings_of(folder: str, saved: str, resumed: str) -> list[str]:
    """Return what a run logs that is stopped with one hook and resumed with another."""
    messages: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: messages.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("trainkit").addHandler(handler)
    train(folder, saved, more=[StopAfterStep(STOP)])
    train(folder, resumed, resume=f"{folder}/{saved}")
    return messages


@pytest.mark.slow
@pytest.mark.parametrize(
    ("saved", "resumed", "expected"),
    [
        ("unsaved", "unsaved", ["do not hold the state of the communication hook: Unsaved has no state_dict"] * 2),
        ("power_sgd", "custom", ["of power_sgd on 2 ranks, and this run has that of momentum_hook on 2: that state"]),
        ("custom", "none", ["of momentum_hook on 2 ranks, and this run has that of none on 2: that state is dropped"]),
    ],
)
def test_state_that_is_not_saved_or_not_restored_is_named_once_a_run(tmp_path, saved, resumed, expected):
    first, second = run_ranks(warnings_of, 2, str(tmp_path), saved, resumed)
    assert len(first) == len(expected) and not second
    assert all(text in message for text, message in zip(expected, first, strict=True))
