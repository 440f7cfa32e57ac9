"""State of communication hooks in checkpoints: a resumed run is equal to the bit with one that was not interrupted."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import TensorDataset
from trainkit.strategies.ddp import DDPStrategy
from trainkit.strategies.ddp.bucket import GradBucket
from trainkit.strategies.ddp.comm_hooks import average_hook
from trainkit.strategies.ddp.transport import HookSteps

from trainkit import Callback, Data, TaskModule, Trainer
from trainkit.checkpoint.store import load_from
from trainkit.distributed.collectives import Collectives, gather
from trainkit.parity.trials import StopAfterStep
from trainkit.testing import run_ranks

STEPS, STOP = 11, 6  # local SGD averages after 4 and 8: the weights of ranks differ when it is stopped


class Regression(TaskModule):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 32))

    def training_step(self, batch: list[Tensor]) -> Tensor:
        return (self.net(batch[0]) - batch[0].sin()).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), lr=0.01)


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
    "bf16": {"reduce_dtype": "bf16", "error_feedback": True, "transport": "process_group"},
    "fp16": {"reduce_dtype": "fp16", "error_feedback": True, "transport": "process_group"},
    "power_sgd": {"comm_hook": "power_sgd", "comm_hook_options": {"rank": 2, "start_step": 3}},
    "local_sgd": {"comm_hook": "local_sgd", "comm_hook_options": {"start_step": 2, "period": 4}},
    "custom": {"comm_hook": momentum_hook, "comm_hook_state": Momentum},
}
HOOKS = {**SAVED, "none": {}, "unsaved": {"comm_hook": unsaved_hook, "comm_hook_state": Unsaved}}


class Notes(Callback):
    """Keeps this rank's weights at the start, when it is stopped and at the end, and the hook's states on rank 0."""

    def on_fit_start(self, run: Any) -> None:
        self.first = flat(run.task)
        self.states = run.strategy.strategy_state().get("hook_states")

    def on_step_end(self, run: Any) -> None:
        if run.state.step == STOP:
            self.stopped = flat(run.task)

    def on_fit_end(self, run: Any) -> None:
        self.weights = flat(run.task)


def flat(task: TaskModule) -> Tensor:
    return torch.cat([p.detach().reshape(-1).to("cpu", copy=True) for p in task.parameters()])


def train(
    folder: str,
    name: str,
    *,
    more: Sequence[Callback] = (),
    resume: str | None = None,
    task: TaskModule | None = None,
    device: str = "cpu",
) -> Notes:
    notes, x = Notes(), torch.randn(240, 32, generator=torch.Generator().manual_seed(1))
    strategy = DDPStrategy(device=device, bucket_cap_mb=0.003, **HOOKS[name])
    trainer = Trainer(
        strategy, max_duration=f"{STEPS}step", callbacks=[notes, *more], loggers=[], run_dir=f"{folder}/{name}"
    )
    trainer.fit(task or Regression(), Data(train=TensorDataset(x), batch_size=12), resume=resume)
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


ON_CUDA = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


@pytest.mark.parametrize("device", [pytest.param("cpu", marks=pytest.mark.slow), pytest.param("cuda", marks=ON_CUDA)])
def test_a_resumed_run_continues_to_the_bit_with_the_errors_and_weights_of_each_rank(device, tmp_path):
    for rank in run_ranks(resumed_and_whole, 2, str(tmp_path), device):
        for name, (resumed, whole, differ) in rank.items():
            assert torch.equal(resumed, whole), name
            assert differ == (name == "local_sgd")


def saved_on_three_ranks(folder: str) -> dict[str, tuple[list[Tensor], Tensor]]:
    """Return by hook the weights of every rank at the checkpoint, and those of this rank after the run."""
    found = {}
    for name in SAVED:
        task = Regression()
        notes = train(folder, name, more=[StopAfterStep(STOP)], task=task)
        found[name] = gather(notes.stopped, dist.group.WORLD), flat(task)
    return found


def resumed_on_two_ranks(folder: str) -> dict[str, tuple[Tensor, Any]]:
    """Return by hook the first weights, and the hook's states on rank 0."""
    found = {}
    for name in SAVED:
        notes = train(folder, name, resume=f"{folder}/{name}")
        found[name] = notes.first, notes.states
    return found


def saved_in(folder: str) -> dict[str, Any]:
    return load_from(Path(folder), Collectives()).payload


@pytest.mark.slow
def test_on_another_number_of_ranks_the_sum_of_errors_and_the_mean_of_weights_are_kept(tmp_path):
    three = run_ranks(saved_on_three_ranks, 3, str(tmp_path))
    first, second = run_ranks(resumed_on_two_ranks, 2, str(tmp_path))
    for name in ("bf16", "fp16", "power_sgd"):
        saved, resumed = saved_in(f"{tmp_path}/{name}")["strategy"]["hook_states"], first[name][1]
        assert len(saved) == 3 and len(resumed) == 2
        for key in saved[0]["hooks"][""]["errors"]:
            old, new = ([each["hooks"][""]["errors"][key] for each in states] for states in (saved, resumed))
            assert torch.equal(new[0], new[1])
            torch.testing.assert_close(sum(new), sum(old))
        assert any(error.any() for error in resumed[0]["hooks"][""]["errors"].values())
    saved_weights, after = three[0]["local_sgd"]
    mean, task = torch.stack(saved_weights).mean(0), saved_in(f"{tmp_path}/local_sgd")["task"]
    assert not torch.equal(saved_weights[0], saved_weights[1])
    torch.testing.assert_close(torch.cat([weights.reshape(-1) for weights in task.values()]), mean)
    for rank in (first, second):
        torch.testing.assert_close(rank["local_sgd"][0], mean)
    assert all(torch.equal(after, rank["local_sgd"][1]) for rank in three), "ranks end with their mean"


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
        ("power_sgd", "bf16", ["of power_sgd on 2 ranks, and this run has that of bf16 on 2: that state"]),
        (
            "local_sgd",
            "none",
            ["and this run has that of none on 2: it continues from the mean of weights, with the"],
        ),
    ],
)
def test_state_that_is_not_saved_or_not_restored_is_named_once_a_run(tmp_path, saved, resumed, expected):
    first, second = run_ranks(warnings_of, 2, str(tmp_path), saved, resumed)
    assert len(first) == len(expected) and not second
    assert all(text in message for text, message in zip(expected, first, strict=True))
