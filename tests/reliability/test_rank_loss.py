"""Ranks are killed, and the run ends with the weights of a plain loop that lost nobody.

TRAINKIT_KILLS=200 kills as often at random instants (`make torture`).
"""

import json
import multiprocessing
import os
import random
import signal
import tempfile
import threading
import time
from collections import Counter
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import IterableDataset, TensorDataset
from trainkit.callbacks.checkpoint import Checkpoint
from trainkit.strategies.ddp.strategy import DDPStrategy
from trainkit.strategies.fsdp.strategy import FSDPStrategy
from trainkit.strategies.fusion.strategy import FusionStrategy
from trainkit.strategies.pipeline.strategy import PipelineStrategy
from trainkit.strategies.torch_ddp import TorchDDPStrategy

from tests.marks import needs_muon
from trainkit import Callback, Data, TaskModule, Trainer
from trainkit.checkpoint.sharded_state import TensorOfShards, TensorShard, in_memory, shard_placeholder
from trainkit.distributed import launcher
from trainkit.distributed.launcher import RankFailure
from trainkit.distributed.rank_loss import (
    END_SECONDS,
    SAVE_SECONDS,
    SHARED_MEMORY,
    START_SECONDS,
    Handover,
    Recovery,
    SavedStep,
)
from trainkit.errors import Stopped, UserError
from trainkit.loops.handover import put_together

KILLS = int(os.environ.get("TRAINKIT_KILLS", "8"))
BATCH, EPOCHS = 12, 6
INPUTS = torch.randn(48, 4, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
STEPS = EPOCHS * len(INPUTS) // BATCH

Death = tuple[str, int, int]  # place, rank, step


class Fragile(TaskModule):
    """A task whose ranks die at given places, each once."""

    def __init__(self, folder: Path, deaths: tuple[Death, ...] = (), seconds: float = 0.0) -> None:
        super().__init__()
        self.network = network()
        self.register_buffer("steps_seen", torch.zeros((), dtype=torch.int64))
        self.register_buffer("growing", torch.zeros(1))
        self.folder, self.deaths, self.seconds, self.extra = folder, deaths, seconds, 0

    def training_step(self, batch: Any) -> Any:
        self.steps_seen += 1
        self.extra += 1
        self.growing = torch.full((int(self.steps_seen),), float(self.steps_seen))
        time.sleep(self.seconds)
        die(self, "forward", int(self.steps_seen))
        loss = self.network(batch[0]).square().mean()
        if loss.requires_grad:
            step = int(self.steps_seen)
            loss.register_hook(lambda gradient: die(self, "backward", step))
        return loss

    def validation_step(self, batch: Any) -> Any:
        die(self, "evaluation", int(self.steps_seen))
        return {"loss": self.network(batch[0]).square().mean()}

    def get_extra_state(self) -> int:
        return self.extra

    def set_extra_state(self, state: int) -> None:
        self.extra = state

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.01)
        return optimizer, torch.optim.lr_scheduler.StepLR(optimizer, 5, gamma=0.9)


class Staged(Fragile):
    """One that a pipeline can partition: its step reads nothing that it has written."""

    def training_step(self, batch: Any) -> Any:
        time.sleep(self.seconds)
        return self.network(batch[0]).square().mean()


def die(task: Fragile, place: str, step: int, *, late: bool = False) -> None:
    """Kill this rank if it is to die here; `late`: after the others have come as far as they can."""
    death = (place, int(os.environ.get("RANK", "-1")), step)
    if death in task.deaths:
        marker = task.folder / "_".join(map(str, death))
        if not marker.exists():
            marker.touch()
            time.sleep(0.3 * late)
            os.kill(os.getpid(), signal.SIGKILL)


class Bookkeeper(Callback):
    """Counts its calls, and averages the weights, as an EMA does."""

    def __init__(self) -> None:
        self.calls: Counter[str] = Counter()
        self.average: dict[str, Tensor] = {}

    def on_step_end(self, run: Any) -> None:
        self.calls["step"] += 1
        if run.strategy.hands_over and run.strategy.state_part == (0, 1):  # otherwise it has a part of the weights
            for name, parameter in run.task.network.named_parameters():
                average = self.average.setdefault(name, parameter.detach().clone())
                average.lerp_(parameter.detach(), 0.1)
        die(run.task, "step end", run.state.step)

    def on_evaluation_end(self, run: Any, stage: str, metrics: dict[str, float]) -> None:
        self.calls[stage] += 1
        die(run.task, "evaluation end", run.state.step)

    def on_epoch_end(self, run: Any) -> None:
        self.calls["epoch"] += 1
        handover = run.strategy.handover
        if run.state.step == STEPS and handover is not None and handover.newest() is not None:
            self.calls["states that still take memory"] += 1
        die(run.task, "epoch end", run.state.step)

    def on_step_complete(self, run: Any) -> None:
        self.calls["complete"] += 1
        if run.run_dir is not None and (run.run_dir / "summary.json").exists():
            self.calls["summary of a run that has not ended"] += 1
        die(run.task, "step complete", run.state.step)

    def state_dict(self) -> dict[str, Any]:
        return {"calls": dict(self.calls), "average": self.average}

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        self.calls = Counter(saved["calls"])
        self.average = saved["average"]


def network() -> nn.Sequential:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1)).double()


def plain_loop(max_grad_norm: float | None = None) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Return the weights and their averages."""
    model, average = network(), {}
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 5, gamma=0.9)
    for _ in range(EPOCHS):
        for batch in INPUTS.split(BATCH):
            optimizer.zero_grad()
            model(batch).square().mean().backward()
            if max_grad_norm is not None:
                torch.nn.utils.clip_grad_norm_(model.parameters(), max_grad_norm)
            optimizer.step()
            schedule.step()
            for name, parameter in model.named_parameters():
                average.setdefault(name, parameter.detach().clone()).lerp_(parameter.detach(), 0.1)
    return model.state_dict(), average


CALLS = {"step": STEPS, "validation": EPOCHS, "epoch": EPOCHS, "complete": STEPS, "sanity": 1}


def fit(strategy: Any, task: Fragile, run_dir: Path | None, **settings: Any) -> Any:
    bookkeeper = Bookkeeper()
    data = TensorDataset(INPUTS)
    trainer = Trainer(
        strategy,
        max_duration=f"{EPOCHS}epoch",
        evaluate_every="1epoch",
        callbacks=[bookkeeper, *settings.pop("callbacks", ())],
        loggers=[],
        run_dir=run_dir,
        **settings,
    )
    result = trainer.fit(task, Data(train=data, validation=data, batch_size=BATCH, shuffle=False))
    return result, bookkeeper


def assert_undisturbed(
    task: Fragile, result: Any, bookkeeper: Bookkeeper | None = None, *, max_grad_norm: float | None = None
) -> None:
    weights, average = plain_loop(max_grad_norm)
    assert result.steps == STEPS
    for name, weight in weights.items():
        torch.testing.assert_close(task.network.state_dict()[name], weight, rtol=0, atol=1e-12)
    assert (int(task.steps_seen), task.extra) == ((0, 0) if isinstance(task, Staged) else (STEPS, STEPS))
    if not isinstance(task, Staged):
        assert torch.equal(task.growing, torch.full((STEPS,), float(STEPS)))
    if bookkeeper is not None:
        assert bookkeeper.calls == CALLS
        for name, weight in average.items():
            torch.testing.assert_close(bookkeeper.average[name], weight, rtol=0, atol=1e-12)
    assert not left_behind()


def left_behind() -> list[Path]:
    folders = f"trainkit-handover-{os.getpid()}-*"
    return [path for parent in (SHARED_MEMORY, tempfile.gettempdir()) for path in Path(parent).glob(folders)]


ddp, torch_ddp, fusion = (partial(kind, device="cpu") for kind in (DDPStrategy, TorchDDPStrategy, FusionStrategy))


@pytest.mark.parametrize(
    ("strategy", "deaths"),
    [
        (ddp, (("forward", 1, 3), ("step end", 0, 6), ("evaluation", 0, 8), ("epoch end", 1, 12))),
        (torch_ddp, (("backward", 0, 3), ("evaluation end", 1, 8), ("step complete", 1, 9))),
        (fusion, (("backward", 1, 3), ("evaluation", 1, 8), ("step end", 0, 10), ("epoch end", 0, 16))),
    ],
)
def test_lost_ranks_are_replaced_and_no_step_is_lost(strategy: Any, deaths: tuple[Death, ...], tmp_path: Path) -> None:
    task = Fragile(tmp_path, deaths)
    result, bookkeeper = fit(strategy(devices=2, on_rank_loss="replace"), task, tmp_path / "run")
    assert result.rank_losses == len(deaths)
    assert_undisturbed(task, result, bookkeeper)
    summary = json.loads((tmp_path / "run/summary.json").read_text())
    assert (summary["rank_losses"], summary["status"]) == (len(deaths), "finished")
    lines = [json.loads(line) for line in (tmp_path / "run/rank_losses.jsonl").read_text().splitlines()]
    assert [line["from"] for line in lines] == ["the memory of a surviving rank"] * len(deaths)
    assert "rank" in lines[0]["lost"] and "was killed by SIGKILL" in lines[0]["lost"]


@pytest.mark.parametrize("strategy", [ddp, fusion])
def test_the_surviving_ranks_continue_with_the_same_global_batch(strategy: Any, tmp_path: Path) -> None:
    task = Fragile(tmp_path, (("forward", 1, 3), ("step end", 0, 9)))
    result, bookkeeper = fit(strategy(devices=3, on_rank_loss="continue"), task, None)
    assert result.rank_losses == 2
    assert_undisturbed(task, result, bookkeeper)


class Regrows(Callback):
    """Asks for all ranks where fewer go on."""

    def on_step_end(self, run: Any) -> None:
        starter = multiprocessing.parent_process()
        # In the first start it changes nothing.
        if run.state.step == 2 or (run.state.step > 6 and int(os.environ["WORLD_SIZE"]) < 3):
            assert starter is not None and starter.pid is not None
            if run.is_main:
                os.kill(starter.pid, signal.SIGUSR2)
            time.sleep(0.1)


@pytest.mark.parametrize(
    ("deaths", "ranks"),
    [
        ((("forward", 1, 3),), [2, 3]),
        ((("forward", 1, 3), ("forward", 0, 3)), [1, 3]),  # the only survivor has nobody who could die
    ],
)
@pytest.mark.parametrize("strategy", [ddp, fusion])
def test_all_ranks_are_started_again_by_a_signal_after_fewer_have_gone_on(
    strategy: Any, deaths: tuple[Death, ...], ranks: list[int], tmp_path: Path, capfd: Any
) -> None:
    task = Fragile(tmp_path, deaths)
    settings = {"devices": 3, "on_rank_loss": "continue"}
    result, bookkeeper = fit(strategy(**settings), task, tmp_path / "run", callbacks=[Regrows()])
    assert_undisturbed(task, result, bookkeeper)
    lines = [json.loads(line) for line in (tmp_path / "run/rank_losses.jsonl").read_text().splitlines()]
    assert [line["ranks"] for line in lines] == ranks
    assert lines[-1]["from"] == "the memory of a surviving rank"
    assert lines[-1]["lost"] == "SIGUSR2 asked for all ranks"
    assert f"To start all ranks again, type: kill -USR2 {os.getpid()}" in capfd.readouterr().err


def test_a_signal_to_stop_that_comes_while_ranks_are_started_again_is_kept(tmp_path: Path, monkeypatch: Any) -> None:
    after_loss = launcher._after_loss

    def interrupted(*args: Any, **kwargs: Any) -> Any:
        os.kill(os.getpid(), signal.SIGTERM)
        return after_loss(*args, **kwargs)

    monkeypatch.setattr(launcher, "_after_loss", interrupted)
    task = Fragile(tmp_path, (("forward", 1, 3),), seconds=0.05)
    with pytest.raises(Stopped):
        fit(ddp(devices=2, on_rank_loss="continue"), task, None)


def test_the_surviving_ranks_split_a_batch_that_they_cannot_divide(tmp_path: Path) -> None:
    task = Fragile(tmp_path, (("step end", 1, 3),))
    result, _ = fit(ddp(devices=3, accumulate=4, on_rank_loss="continue"), task, None)
    assert result.rank_losses == 1
    weights, _ = plain_loop()
    for name, weight in weights.items():
        torch.testing.assert_close(task.network.state_dict()[name], weight, rtol=0, atol=1e-12)


def test_two_ranks_that_die_at_once_are_replaced(tmp_path: Path) -> None:
    task = Fragile(tmp_path, (("forward", 0, 3), ("forward", 1, 3), ("step end", 1, 9), ("step end", 2, 9)))
    result, bookkeeper = fit(ddp(devices=3, on_rank_loss="replace"), task, None)
    assert result.rank_losses == 2
    assert_undisturbed(task, result, bookkeeper)


@pytest.mark.parametrize(
    "strategy",
    [
        partial(FSDPStrategy, devices=2, device="cpu"),
        partial(FusionStrategy, devices=2, device="cpu", shard_optimizer=True),
        partial(DDPStrategy, devices=2, device="cpu", optimizer_in_backward=True),
        partial(PipelineStrategy, stages=2, device="cpu"),
    ],
    ids=["fsdp", "sharded fusion", "ddp in backward", "pipeline"],
)
def test_ranks_that_hold_a_part_only_go_back_to_the_last_checkpoint(strategy: Any, tmp_path: Path) -> None:
    kind = Staged if strategy.func is PipelineStrategy else Fragile
    task = kind(tmp_path, (("step end", 0, 3), ("step end", 1, 11)))
    result, _ = fit(strategy(on_rank_loss="replace"), task, tmp_path / "run", callbacks=[Checkpoint(every="5step")])
    assert result.rank_losses == 2
    assert_undisturbed(task, result)
    lines = [json.loads(line) for line in (tmp_path / "run/rank_losses.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [0, 10]


class DiesInBackward(Callback):
    """Kills ranks while gradients are computed, also where the step is not the code of the task."""

    def on_fit_start(self, run: Any) -> None:
        first = next(iter(run.task.network.parameters()))
        if first.requires_grad:
            first.register_hook(lambda gradient: die(run.task, "gradient", run.state.step + 1, late=True))


class Counts(nn.Module):
    """Counts its calls in a buffer and in its extra state."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))
        self.extra_calls = 0

    def forward(self, inputs: Tensor) -> Tensor:
        self.calls += 1.0
        self.extra_calls += 1
        return inputs * (self.extra_calls / self.extra_calls)

    def get_extra_state(self) -> int:
        return self.extra_calls

    def set_extra_state(self, state: int) -> None:
        self.extra_calls = state


class StagedOnly(Staged):
    """One without buffers."""

    def __init__(self, folder: Path, deaths: tuple[Death, ...] = ()) -> None:
        super().__init__(folder, deaths)
        del self.steps_seen, self.growing
        self.steps_seen = 0


class StagedCounts(Staged):
    """One that changes buffers in each of its stages."""

    def __init__(self, folder: Path, deaths: tuple[Death, ...] = ()) -> None:
        super().__init__(folder, deaths)
        self.before, self.after = Counts(), Counts()

    def training_step(self, batch: Any) -> Any:
        return self.after(self.network(self.before(batch[0]))).square().mean()


@pytest.mark.parametrize(
    ("strategy", "kind", "max_grad_norm", "deaths"),
    [
        (
            partial(FSDPStrategy, devices=4, device="cpu", replicate=2),
            Fragile,
            0.1,
            (("gradient", 1, 3), ("in step end", 2, 6), ("in evaluation end", 0, 8), ("in step complete", 3, 12)),
        ),
        (
            partial(PipelineStrategy, stages=2, replicas=2, accumulate=1, device="cpu"),
            StagedCounts,
            None,
            (("gradient", 0, 3), ("in step end", 1, 6), ("in evaluation end", 3, 8), ("in step complete", 2, 12)),
        ),
        pytest.param(
            # Without a norm and buffers the middle stage needs no other one between its gradients and its update.
            partial(PipelineStrategy, stages=3, replicas=2, accumulate=1, device="cpu"),
            StagedOnly,
            None,
            (("gradient", 0, 3),),
            marks=pytest.mark.slow,
        ),
    ],
    ids=["fsdp", "pipeline", "pipeline without buffers"],
)
def test_the_parts_of_the_state_are_put_together_where_each_has_a_survivor(
    strategy: Any, kind: type[Fragile], max_grad_norm: float | None, deaths: tuple[Death, ...], tmp_path: Path
) -> None:
    task = kind(tmp_path, deaths)
    callbacks = [DiesInBackward(), Meets()]
    result, bookkeeper = fit(strategy(), task, tmp_path / "run", callbacks=callbacks, max_grad_norm=max_grad_norm)
    assert result.rank_losses == len(deaths)
    assert bookkeeper.calls == CALLS
    lines = [json.loads(line) for line in (tmp_path / "run/rank_losses.jsonl").read_text().splitlines()]
    assert [line["from"] for line in lines] == ["the memory of a surviving rank"] * len(deaths)
    assert [line["step"] for line in lines] == [2, 6, 8, 12][: len(deaths)]
    assert_undisturbed(task, result, max_grad_norm=max_grad_norm)
    if isinstance(task, StagedCounts):
        assert (task.before.calls, task.after.calls) == (STEPS, STEPS)
        assert (task.before.extra_calls, task.after.extra_calls) == (STEPS, STEPS)


@needs_muon
def test_muon_whose_matrices_are_divided_over_all_ranks_goes_back_to_the_last_checkpoint(tmp_path: Path) -> None:
    class Orthogonal(Fragile):
        def __init__(self, folder: Path, deaths: tuple[Death, ...] = ()) -> None:
            super().__init__(folder, deaths)
            self.network = nn.Sequential(*(nn.Linear(4, 4, bias=False, dtype=torch.float64) for _ in range(4)))

        def configure_optimizers(self) -> Any:
            return torch.optim.Muon(self.parameters(), lr=0.01)

    torch.manual_seed(0)
    expected = Orthogonal(tmp_path)
    task = Orthogonal(tmp_path, (("step end", 1, 7),))
    task.load_state_dict(expected.state_dict())
    fit(ddp(devices=2), expected, None)
    strategy = FSDPStrategy(devices=4, device="cpu", replicate=2)
    fit(strategy, task, tmp_path / "run", callbacks=[Checkpoint(every="5step")])
    for name, tensor in expected.network.state_dict().items():
        torch.testing.assert_close(task.network.state_dict()[name], tensor, rtol=0, atol=1e-9)
    (loss,) = (tmp_path / "run/rank_losses.jsonl").read_text().splitlines()
    assert json.loads(loss)["step"] == 5


def test_a_step_of_which_a_part_is_lost_goes_back_to_the_last_checkpoint(tmp_path: Path) -> None:
    task = Fragile(tmp_path, (("step end", 0, 7), ("step end", 2, 7)))  # the same part of both replicas
    strategy = FSDPStrategy(devices=4, device="cpu", replicate=2)
    result, _ = fit(strategy, task, tmp_path / "run", callbacks=[Checkpoint(every="5step")])
    assert_undisturbed(task, result)
    (loss,) = (tmp_path / "run/rank_losses.jsonl").read_text().splitlines()
    assert json.loads(loss)["step"] == 5


class Meets(Callback):
    """Has collectives in its hooks, in which the survivors find that a rank is gone."""

    def on_step_end(self, run: Any) -> None:
        die(run.task, "in step end", run.state.step)
        run.strategy.comm.barrier()

    def on_evaluation_end(self, run: Any, stage: str, metrics: dict[str, float]) -> None:
        die(run.task, "in evaluation end", run.state.step)
        run.strategy.comm.barrier()

    def on_step_complete(self, run: Any) -> None:
        die(run.task, "in step complete", run.state.step)
        run.strategy.comm.barrier()


def test_each_hook_is_called_once_before_and_after_an_interrupted_one(tmp_path: Path) -> None:
    task = Fragile(tmp_path, (("in step end", 1, 5), ("in evaluation end", 0, 8), ("in step complete", 1, 12)))
    last = Bookkeeper()
    result, first = fit(ddp(devices=2), task, None, callbacks=[Meets(), last])
    assert result.rank_losses == 3
    for bookkeeper in (first, last):
        assert_undisturbed(task, result, bookkeeper)


def test_a_stop_that_was_requested_before_a_loss_is_made(tmp_path: Path) -> None:
    class Stops(Callback):
        def on_step_end(self, run: Any) -> None:
            if run.state.step == 9 and run.strategy.attempt == 0:
                run.request_stop("enough")

    task = Fragile(tmp_path, (("in step complete", 1, 9),))
    result, _ = fit(ddp(devices=2), task, None, callbacks=[Stops(), Meets()])
    assert (result.rank_losses, result.steps, result.exit_reason) == (1, 9, "enough")


def test_a_loss_between_two_updates_of_a_step_goes_back_to_the_last_checkpoint(tmp_path: Path) -> None:
    class Searching(Fragile):
        def configure_optimizers(self) -> Any:
            return torch.optim.LBFGS(self.parameters(), lr=0.1, max_iter=4)

        def training_step(self, batch: Any) -> Any:
            self.extra += torch.is_grad_enabled()
            die(self, "search", self.extra)
            return self.network(batch[0]).square().mean()

    model = network()
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=4)
    for _ in range(EPOCHS):
        for batch in INPUTS.split(BATCH):

            def closure(batch: Tensor = batch) -> Tensor:
                optimizer.zero_grad()
                loss: Tensor = model(batch).square().mean()
                loss.backward()
                return loss

            optimizer.step(closure)
    task = Searching(tmp_path, (("search", 1, 4 * 6 + 3),))
    result, _ = fit(ddp(devices=2), task, tmp_path / "run", callbacks=[Checkpoint(every="5step")])
    assert result.rank_losses == 1
    for name, weight in model.state_dict().items():
        torch.testing.assert_close(task.network.state_dict()[name], weight, rtol=0, atol=1e-9)
    (loss,) = (tmp_path / "run/rank_losses.jsonl").read_text().splitlines()
    assert json.loads(loss)["step"] == 5


def test_checkpoints_of_an_earlier_run_in_the_folder_are_not_gone_on_from(tmp_path: Path) -> None:
    strategy = partial(FSDPStrategy, devices=2, device="cpu")
    fit(strategy(), Fragile(tmp_path), tmp_path / "run", callbacks=[Checkpoint(every="5step")])
    task = Fragile(tmp_path, (("step end", 1, 3),))
    result, _ = fit(strategy(), task, tmp_path / "run", callbacks=[Checkpoint(every="5step")])
    assert_undisturbed(task, result)
    (loss,) = (tmp_path / "run/rank_losses.jsonl").read_text().splitlines()
    assert json.loads(loss)["from"] == "the start"


def test_ranks_that_read_a_stream_go_back_to_the_last_checkpoint(tmp_path: Path) -> None:
    class Stream(IterableDataset[Tensor]):
        def __iter__(self) -> Any:
            return iter([(row,) for row in INPUTS])

    task = Fragile(tmp_path, (("forward", 1, 9),))
    trainer = Trainer(
        ddp(devices=2),
        max_duration=f"{STEPS}step",
        callbacks=[Checkpoint(every="5step")],
        loggers=[],
        run_dir=tmp_path / "run",
    )
    result = trainer.fit(task, Data(train=Stream(), batch_size=BATCH))
    assert_undisturbed(task, result)
    (loss,) = (tmp_path / "run/rank_losses.jsonl").read_text().splitlines()
    assert json.loads(loss)["step"] == 5


def test_an_error_in_user_code_ends_the_run_although_ranks_would_be_replaced(tmp_path: Path) -> None:
    class Wrong(Fragile):
        def training_step(self, batch: Any) -> Any:
            if os.environ.get("RANK") == "1":
                (self.folder / f"{os.getpid()}").touch()
                raise ValueError("wrong on purpose")
            return super().training_step(batch)

    with pytest.raises(ValueError, match="wrong on purpose"):
        fit(ddp(devices=2, on_rank_loss="replace"), Wrong(tmp_path), None)
    assert len(list(tmp_path.iterdir())) == 1  # one start
    assert not left_behind()


def test_a_program_that_kills_its_ranks_again_and_again_ends(tmp_path: Path) -> None:
    class Deadly(Fragile):
        def training_step(self, batch: Any) -> Any:
            if os.environ.get("RANK") == "1" and int(self.steps_seen) == 4:
                (self.folder / f"{os.getpid()}").touch()
                os.kill(os.getpid(), signal.SIGKILL)
            return super().training_step(batch)

    with pytest.raises(RankFailure, match=r"rank 1 \(pid \d+\) was killed by SIGKILL"):
        fit(ddp(devices=2, on_rank_loss="replace", max_rank_losses=2), Deadly(tmp_path), None)
    assert len(list(tmp_path.iterdir())) == 3
    assert not left_behind()


def test_a_rank_that_exits_by_itself_is_not_replaced(tmp_path: Path) -> None:
    class Leaves(Fragile):
        def training_step(self, batch: Any) -> Any:
            if os.environ.get("RANK") == "1":
                (self.folder / f"{os.getpid()}").touch()
                os._exit(3)
            return super().training_step(batch)

    with pytest.raises(RankFailure, match="exit code 3"):
        fit(ddp(devices=2, on_rank_loss="replace"), Leaves(tmp_path), None)
    assert len(list(tmp_path.iterdir())) == 1  # one start


def test_settings_that_have_no_effect_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UserError, match=r"on_rank_loss=replace is for ranks of the local launcher"):
        ddp(devices=2, on_rank_loss="replace", launcher="ray")
    for name, value in {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(UserError, match=r"torchrun --max-restarts=3 \.\.\. resume=auto"):
        fit(ddp(devices=1, on_rank_loss="continue"), Fragile(tmp_path), None)
    with pytest.raises(UserError, match="on_rank_loss"):
        ddp(on_rank_loss="restart")
    for parts in (partial(PipelineStrategy, stages=2), partial(FSDPStrategy, devices=4, replicate=2)):
        with pytest.raises(UserError, match=r"fewer cannot go on. Set strategy.on_rank_loss=replace"):
            parts(device="cpu", on_rank_loss="continue")


# ---- What is handed over


def test_the_state_of_the_latest_step_is_handed_over(tmp_path: Path) -> None:
    handover = Handover((str(tmp_path),))
    for step in (3, 5, 4):
        handover.save(torch.full((2,), float(step)), num_bytes=8, step=step)
    newest = handover.newest()
    assert newest is not None and newest.step == 5
    assert sorted(path.stem for path in tmp_path.glob("*.pt")) == ["0_3_1_0", "0_5_1_0"]
    started = Handover((str(tmp_path),), source=newest, attempt=1)
    ((weights,), callbacks) = started.load()
    assert (weights.tolist(), callbacks) == ([5.0, 5.0], None)
    started.save("after a rollback", num_bytes=0, step=4)
    assert started.newest() == (1, 4, [tmp_path / "1_4_1_0.pt"])
    started.save("after further hooks", num_bytes=0, step=5)
    assert started.newest() == (1, 5, [tmp_path / "1_5_1_0.pt"])
    started.save("by a rank that the others have lost", num_bytes=0, step=4)
    started.discard()
    started.discard()  # another rank
    assert sorted(path.stem for path in tmp_path.glob("*.pt")) == ["1_4_1_0", "1_5_1_0"]


def test_the_callbacks_have_the_state_of_the_main_rank_if_it_survives(tmp_path: Path) -> None:
    handover = Handover((str(tmp_path),))
    handover.save("state", num_bytes=0, step=3)
    handover.save("state", num_bytes=0, step=3, callbacks={"seen": "by rank 0"})
    newest = handover.newest()
    assert newest is not None
    started = Handover((str(tmp_path),), source=newest, attempt=1)
    assert started.load() == (["state"], {"seen": "by rank 0"})
    started.discard()
    assert started.newest() is None
    assert not list(tmp_path.glob("*.main"))


def test_a_state_in_parts_is_handed_over_once_all_parts_of_a_step_are_there(tmp_path: Path) -> None:
    def save(handover: Handover, step: int, part: int, content: str = "") -> None:
        handover.save(content or f"part {part} of {step}", num_bytes=0, step=step, part=(part, 2))

    handover = Handover((str(tmp_path),))
    save(handover, 4, 0)
    save(handover, 4, 0, "of another replica")
    save(handover, 5, 0)
    assert handover.newest() is None
    save(handover, 4, 1)
    newest = handover.newest()
    assert newest is not None and newest.step == 4
    started = Handover((str(tmp_path),), source=newest, attempt=1)
    assert started.load() == (["part 0 of 4", "part 1 of 4"], None)
    # A part of a later start is another one: its random numbers are others.
    save(started, 6, 0)
    save(handover, 6, 1)
    assert handover.newest() == newest


def test_the_parts_of_a_state_are_put_together() -> None:
    weights, rows, rest = torch.randn(5, 2), (0, 3, 5), "optimizer.0.exp_avg"
    parts = []
    for part in (0, 1):
        moment = shard_placeholder(rest, weights.T) if part else 4
        state = {
            "task": {"weights": shard_placeholder("weights", weights), f"only {part}": part},
            "optimizer": {"state": {part: {"exp_avg": moment}}},
            "strategy": {},
            "state": f"of part {part}",
        }
        local_rows = weights[rows[part] : rows[part + 1]].reshape(-1)
        shards = [TensorShard("weights", local_rows, 2 * rows[part], 10)]
        parts.append((state, [*shards, TensorShard(rest, weights.reshape(-1), 0, 10)] if part else shards))
    whole = in_memory(put_together(parts))
    assert torch.equal(whole["task"]["weights"], weights)
    assert (whole["task"]["only 0"], whole["task"]["only 1"]) == (0, 1)
    assert whole["optimizer"]["state"][0] == {"exp_avg": 4}
    assert torch.equal(whole["optimizer"]["state"][1]["exp_avg"], weights.T)
    assert whole["state"] == "of part 0"
    with pytest.raises(ValueError, match="the shards of weights are not all of its 10 elements"):
        TensorOfShards(shard_placeholder("weights", weights), [TensorShard("weights", weights[3:].reshape(-1), 6, 10)])


def test_a_state_without_room_in_memory_goes_to_the_next_folder(tmp_path: Path) -> None:
    full, folder = "/dev/full", tmp_path / "folder"
    folder.mkdir()
    first = tmp_path / "first"
    first.mkdir()
    (first / "0_3_1_0.part").symlink_to(full)
    handover = Handover((str(first), str(folder)))
    handover.save(torch.zeros(200_000), num_bytes=800_000, step=3)
    newest = handover.newest()
    assert newest is not None and newest.paths[0].parent == folder


def test_folders_of_killed_programs_are_removed_and_those_in_use_are_not(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr("trainkit.distributed.rank_loss.SHARED_MEMORY", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "disk"))
    (tmp_path / "disk").mkdir()
    abandoned, young = tmp_path / "trainkit-handover-1-a", tmp_path / "trainkit-handover-1-b"
    for folder in (abandoned, young):
        folder.mkdir()
        (folder / "0_3_1_0.pt").touch()
    os.utime(abandoned, (0, 0))
    with recovery().entered() as used:
        for folder in used.folders:
            os.utime(folder, (0, 0))
        with recovery().entered():
            assert all(Path(folder).is_dir() for folder in used.folders)
            assert not abandoned.exists()
            assert young.exists()
    assert list(tmp_path.glob("trainkit-handover-*")) == [young]


def test_a_rank_that_dies_after_the_end_of_the_run_changes_nothing(tmp_path: Path) -> None:
    class DiesLate(Bookkeeper):
        def close(self) -> None:
            if os.environ.get("RANK") == "1":
                (tmp_path / f"{os.getpid()}").touch()
                time.sleep(1.0)
                os.kill(os.getpid(), signal.SIGKILL)

    task = Fragile(tmp_path)
    data = Data(train=TensorDataset(INPUTS), batch_size=BATCH, shuffle=False)
    trainer = Trainer(
        ddp(devices=2, on_rank_loss="replace"),
        max_duration=f"{EPOCHS}epoch",
        callbacks=[DiesLate()],
        loggers=[],
        run_dir=None,
    )
    result = trainer.fit(task, data)
    assert len(list(tmp_path.iterdir())) == 1  # one start
    assert_undisturbed(task, result)


def recovery(**settings: Any) -> Recovery:
    return Recovery(**{"keeps_ranks": True, "hands_over": True, "max_losses": 2, "saved": lambda: None} | settings)


def test_losses_count_only_while_no_new_step_is_reached() -> None:
    decides = recovery()
    with decides.entered() as handover:
        for step in (1, 2, 3, 4):
            handover.save(None, num_bytes=0, step=step)
            assert decides.after(["rank 1"], since=0.0) is not None
        assert decides.after(["rank 1"], since=0.0) is not None
        assert decides.after(["rank 1"], since=0.0) is None


def test_a_checkpoint_later_than_what_survivors_have_is_gone_on_from() -> None:
    decides = recovery(saved=lambda: SavedStep(7, Path("step_7")))
    with decides.entered() as handover:
        handover.save(None, num_bytes=0, step=6)
        started = decides.after(["rank 1"], since=0.0)
        assert started is not None and started.source is None
        assert decides.checkpoint == "step_7"
        handover.save(None, num_bytes=0, step=8)
        started = decides.after(["rank 1"], since=0.0)
        assert started is not None and started.source is not None


def test_survivors_have_time_until_the_first_has_handed_over() -> None:
    decides = recovery()
    with decides.entered() as handover:
        assert decides.patience() == START_SECONDS
        handover.begin()
        assert decides.patience() == SAVE_SECONDS
        handover.save(None, num_bytes=0, step=6)
        assert decides.patience() == END_SECONDS
        assert decides.after(["rank 1"], since=0.0) is not None
        assert decides.patience() == START_SECONDS  # of the next ranks
        handover.begin()
        assert decides.patience() == SAVE_SECONDS
        handover.refuse()
        assert decides.patience() == END_SECONDS
    alone = recovery(hands_over=False)
    with alone.entered() as handover:
        handover.begin()
        assert alone.patience() == END_SECONDS


# ---- A campaign


LAYOUTS = {
    "ddp": partial(ddp, devices=2),
    "ddp on three ranks": partial(ddp, devices=3),
    "torch_ddp": partial(torch_ddp, devices=2),
    "fusion": partial(fusion, devices=3),
    "sharded fusion": partial(fusion, devices=2, shard_optimizer=True),
    "fsdp": partial(FSDPStrategy, devices=2, device="cpu"),
    "fsdp with replicas": partial(FSDPStrategy, devices=4, device="cpu", replicate=2),
    "pipeline": partial(PipelineStrategy, stages=2, replicas=2, device="cpu"),
}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("layout", "policy"),
    [(layout, "replace") for layout in LAYOUTS]
    + [(layout, "continue") for layout in LAYOUTS if layout not in ("fsdp with replicas", "pipeline")],
)
def test_a_run_whose_ranks_are_killed_at_random_ends_with_the_weights_of_a_plain_loop(
    layout: str, policy: str, tmp_path: Path
) -> None:
    strategy = LAYOUTS[layout](on_rank_loss=policy, max_rank_losses=1000)
    num_ranks = strategy.num_ranks()
    # Replaced ranks can be killed for ever; of those that are not, the last one must live.
    num_kills = KILLS // len(LAYOUTS) if policy == "replace" else num_ranks - 1
    # Four ranks on two cores start for more than a second: most kills would come before the first step.
    killer = Killer(num_kills, seed=f"{layout} {policy}", most_seconds=0.9 if num_ranks < 4 else 4.0)
    recoveries = from_memory = 0
    for number in range(num_kills):
        task = (Staged if layout == "pipeline" else Fragile)(tmp_path, seconds=0.05)
        with killer:
            result, _ = fit(strategy, task, tmp_path / f"run_{number}", callbacks=[Checkpoint(every="4step")])
        assert_undisturbed(task, result)
        assert not multiprocessing.active_children()
        recoveries += result.rank_losses
        losses = tmp_path / f"run_{number}/rank_losses.jsonl"
        from_memory += losses.read_text().count("the memory of a surviving rank") if losses.exists() else 0
        if killer.killed == num_kills or policy == "continue":
            break
    print(f"{layout}, {policy}: {killer.killed} ranks killed, {recoveries} recoveries, {from_memory} from memory")
    assert killer.killed > 0


class Killer:
    """Kills random ranks of the run in this process at random instants, sometimes two at once."""

    def __init__(self, num_kills: int, *, seed: str, most_seconds: float) -> None:
        self.num_kills, self.random, self.killed = num_kills, random.Random(seed), 0
        self.most_seconds = most_seconds  # between two kills

    def __enter__(self) -> None:
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._kill_all)
        self._thread.start()

    def __exit__(self, *_: object) -> None:
        self._done.set()
        self._thread.join()

    def _kill_all(self) -> None:
        while self.killed < self.num_kills and not self._done.wait(self.random.uniform(0.05, self.most_seconds)):
            alive = [process.pid for process in multiprocessing.active_children() if process.pid]
            wanted = min(self.random.choice((1, 1, 1, 2)), self.num_kills - self.killed, max(len(alive) - 1, 0))
            for pid in self.random.sample(alive, wanted):
                try:
                    os.kill(pid, signal.SIGKILL)
                except ProcessLookupError:
                    continue
                self.killed += 1
