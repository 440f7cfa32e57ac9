"""The strategies `ddp` and `torch_ddp` under the Trainer: the same weights as on one device, and orderly ends."""

from __future__ import annotations

import copy
import logging
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import run as torchrun
from torch.utils.data import Dataset, IterableDataset, TensorDataset
from trainkit.strategies.ddp import DDPStrategy
from trainkit.strategies.fsdp.strategy import FSDPStrategy
from trainkit.strategies.fusion.strategy import FusionStrategy
from trainkit.strategies.single import SingleStrategy
from trainkit.strategies.torch_ddp import TorchDDPStrategy

from tests.marks import in_make_zoo
from tests.program import Program, is_running, wait_until
from tests.tasks import Fitting, flat, seeded, sgd
from tests.tasks import fit as train
from trainkit import Data, TaskModule, Trainer, UserError
from trainkit.optim.precision import Precision
from trainkit.testing import run_ranks

NUM_SAMPLES = 53


class Regression(Fitting):
    def __init__(self, *, weighted: bool = False, normalized: bool = False) -> None:
        middle = nn.BatchNorm1d(16) if normalized else nn.Tanh()
        super().__init__(seeded(lambda: nn.Sequential(nn.Linear(8, 16), middle, nn.Linear(16, 1))), sgd)
        self.weighted = weighted

    def training_step(self, batch: Any) -> Any:
        if not self.weighted:
            return super().training_step(batch)
        x, y = batch
        tokens = 1 + (x[:, :1] > 0)  # each sample counts once or twice
        return {"loss": ((self.net(x) - y).square() * tokens).sum() / tokens.sum(), "weight": tokens.sum()}

    def validation_step(self, batch: Any) -> Any:
        return super().training_step(batch)

    def predict_step(self, batch: Any) -> Tensor:
        return batch[1]


def samples() -> TensorDataset:
    x = torch.randn(NUM_SAMPLES, 8, generator=torch.Generator().manual_seed(1))
    return TensorDataset(x, x.sum(1, keepdim=True))


def fit(strategy: Any, task: TaskModule, *, batch_size: int = 12, **settings: Any) -> None:
    data = Data(train=samples(), validation=samples(), batch_size=batch_size)
    train(strategy, task, data, **{"max_duration": "2epoch", "log_every": "1step", **settings})


CASES: dict[str, tuple[dict[str, Any], dict[str, Any], dict[str, Any]]] = {
    # arguments of the task, of the strategy, of the Trainer
    "plain": ({}, {}, {}),
    "accumulated": ({}, {"accumulate": 2}, {}),
    "small micro-batches": ({}, {"micro_batch_size": 2}, {}),
    "weighted": ({"weighted": True}, {}, {}),
    "weighted, accumulated": ({"weighted": True}, {"micro_batch_size": 2}, {}),
    "clipped": ({}, {}, {"max_grad_norm": 0.5}),
    "skipping": ({}, {}, {"on_nonfinite": "skip"}),
    "bfloat16": ({}, {}, {"precision": "bf16-mixed"}),
    "through gloo": ({}, {"transport": "process_group"}, {}),
    "overlapped": ({}, {"optimizer_in_backward": True, "bucket_cap_mb": 0.0001}, {}),
    "static": ({}, {"static_graph": True}, {}),
    "found": ({}, {"find_unused_parameters": "graph"}, {}),
    "timed": ({}, {"record_timeline": True}, {}),
}
AN_EPOCH_AND_A_STEP: dict[str, Any] = {"max_duration": "6step", "evaluate_every": None}
TOLERANCES = {"bfloat16": 2e-2}


@pytest.fixture(scope="module")
def weights_of_single(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Tensor]:
    """The weights of one device in each case; cases that differ in the strategy alone have the same."""
    found: dict[str, Tensor] = {}
    for task_arguments, _, settings in CASES.values():
        key = str((task_arguments, settings))
        if key not in found:
            alone, folder = Regression(**task_arguments), tmp_path_factory.mktemp("single")
            fit(SingleStrategy(device="cpu"), alone, run_dir=folder, **AN_EPOCH_AND_A_STEP, **settings)
            found[key] = flat(alone)
    return {name: found[str((task_arguments, settings))] for name, (task_arguments, _, settings) in CASES.items()}


def distances_to(single: dict[str, Tensor], folder: str) -> dict[str, float]:
    found = {}
    for name, weights in single.items():
        task_arguments, arguments, settings = CASES[name]
        own = {key: value for key, value in arguments.items() if key in ("accumulate", "micro_batch_size")}
        start = Regression(**task_arguments)
        strategies = {"ddp": DDPStrategy(device="cpu", **arguments)}
        if arguments == own:
            strategies["torch_ddp"] = TorchDDPStrategy(device="cpu", **own)
        for kind, strategy in strategies.items():
            task = copy.deepcopy(start)
            fit(strategy, task, run_dir=f"{folder}/{kind} {name}", **AN_EPOCH_AND_A_STEP, **settings)
            found[f"{kind} {name}"] = (flat(task) - weights).abs().max().item()
    return found


@pytest.mark.parametrize(
    "num_ranks",
    [
        2,
        *(pytest.param(number, marks=pytest.mark.slow) for number in (1, 3)),
        pytest.param(4, marks=[pytest.mark.slow, in_make_zoo]),
    ],
)
def test_weights_are_those_of_one_device(num_ranks, weights_of_single, tmp_path):
    # 53 samples in batches of 12 end with one of 5, which leaves ranks with unequal shards.
    for rank in run_ranks(distances_to, num_ranks, weights_of_single, str(tmp_path), timeout=150):
        for name, distance in rank.items():
            assert distance < TOLERANCES.get(name.split(" ", 1)[1], 2e-5), name


def short_batches(folder: str) -> tuple[float, float]:
    """The last batch has one sample: one of the ranks has it, the others have none."""
    distances = []
    for weighted in (False, True):
        task, alone = Regression(weighted=weighted), Regression(weighted=weighted)
        if dist.get_rank() == 0:
            fit(SingleStrategy(device="cpu"), alone, batch_size=13, run_dir=f"{folder}/single {weighted}")
        weights = flat(alone)
        dist.broadcast(weights, 0)
        fit(DDPStrategy(device="cpu"), task, batch_size=13, run_dir=f"{folder}/ddp {weighted}")
        distances.append((flat(task) - weights).abs().max().item())
    return distances[0], distances[1]


def test_ranks_without_samples_in_the_last_batch_add_zeros(tmp_path):
    for distances in run_ranks(short_batches, 3, str(tmp_path)):
        assert max(distances) < 2e-5


class Sizes(Dataset[Any]):
    """A pre-batched dataset, whose first two batches are smaller than the number of ranks."""

    sizes = (1, 2, 9, 1, 6)

    def __len__(self) -> int:
        return len(self.sizes)

    def __getitem__(self, index: int) -> tuple[Tensor, ...]:
        return samples()[10 * index : 10 * index + self.sizes[index]]


def empty_shards_at_first(folder: str) -> dict[str, float]:
    data, found = Data(train=Sizes(), batch_size=None, shuffle=False), {}
    alone = Regression()
    if dist.get_rank() == 0:
        train(SingleStrategy(device="cpu"), alone, data, max_duration="2epoch", run_dir=f"{folder}/single")
    weights = flat(alone)
    dist.broadcast(weights, 0)
    for strategy in (
        DDPStrategy(device="cpu"),
        TorchDDPStrategy(device="cpu"),
        FusionStrategy(device="cpu"),
        FSDPStrategy(device="cpu", units=["Linear"]),
    ):
        name, task = type(strategy).__name__, Regression()
        train(strategy, task, data, max_duration="2epoch", run_dir=f"{folder}/{name}")
        found[name] = (flat(task) - weights).abs().max().item()
    return found


def test_ranks_may_have_no_samples_in_the_first_batch(tmp_path):
    for distances in run_ranks(empty_shards_at_first, 3, str(tmp_path)):
        assert len(distances) == 4 and max(distances.values()) < 2e-5, distances


def buffers_after_training(folder: str) -> list[float]:
    task = Regression(normalized=True)
    fit(DDPStrategy(device="cpu"), task, run_dir=folder)
    return task.net[1].running_mean.tolist()


def test_buffers_are_rank_0s_on_every_rank(tmp_path):
    first, second = run_ranks(buffers_after_training, 2, str(tmp_path))
    assert first == second


class Lines(logging.Handler):
    """Keeps what is logged."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


def logged_with_a_timeline(folder: str) -> list[str]:
    handler, logger = Lines(), logging.getLogger("trainkit.strategies.reducer.gradient_reducer")
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    fit(DDPStrategy(device="cpu", record_timeline=True), Regression(), run_dir=folder)
    return handler.lines


def test_a_timeline_is_written_by_every_rank_and_logged_by_the_first(tmp_path):
    first, second = run_ranks(logged_with_a_timeline, 2, str(tmp_path))
    assert "of communication" in first[0]
    assert second == []
    assert '"bucket 0"' in (tmp_path / "timeline.json").read_text(), "drawn in the report"
    assert {file.name for file in tmp_path.glob("timeline_*")} == {"timeline_rank_0.json", "timeline_rank_1.json"}


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Any:
        return (tuple(row) for row in samples())


class PreBatched(Dataset[Any]):
    """A pre-batched dataset with unequal batch sizes."""

    sizes = (7, 1, 10, 5)

    def __len__(self) -> int:
        return len(self.sizes)

    def __getitem__(self, index: int) -> tuple[Tensor, ...]:
        start = sum(self.sizes[:index])
        return samples()[start : start + self.sizes[index]]


def predicted(arguments: dict[str, Any]) -> list[Any]:
    trainer = Trainer(strategy=DDPStrategy(device="cpu", **arguments), callbacks=[], loggers=[])
    return [
        trainer.predict(Regression(), data)
        for data in (
            Data(predict=samples(), batch_size=5),
            Data(predict=Stream(), batch_size=5),
            Data(predict=PreBatched(), batch_size=None),
        )
    ]


@pytest.mark.slow
@pytest.mark.parametrize("num_ranks", [2, 3])
def test_predictions_are_in_order_for_any_batch_sizes(num_ranks):
    # No batch is a multiple of the ranks, and one pre-batched one is smaller than their number.
    targets = samples().tensors[1]
    for arguments in ({}, {"micro_batch_size": 2}):
        by_sample, by_stream, pre_batched = run_ranks(predicted, num_ranks, arguments)[0]
        assert torch.equal(by_sample, targets)
        assert torch.equal(by_stream, targets)
        assert torch.equal(pre_batched, targets[: sum(PreBatched.sizes)])


class Forgetful(Regression):
    """Returns a weight in the first step only, or in all but the first."""

    def __init__(self, *, first: bool) -> None:
        super().__init__(weighted=first)

    def training_step(self, batch: Any) -> Any:
        returned = super().training_step(batch)
        self.weighted = not self.weighted
        return returned


def waits_and_refusals(folder: str) -> tuple[list[str], list[str]]:
    """Return the calls in which the host waited for the device after the first step, and the errors about weights."""
    task, waits = Regression(weighted=True), []

    def watched(name: str, original: Any) -> Any:
        def method(tensor: Tensor, *args: Any) -> Any:
            if 1 < task.calls < 4 and tensor.dtype != torch.int64:  # the stop check is on the host
                waits.append(name)
            return original(tensor, *args)

        return method

    def counted(batch: Any) -> Any:
        task.calls += 1
        return Regression.training_step(task, batch)

    task.calls, task.training_step = 0, counted
    names = ("item", "tolist", "__bool__", "__float__", "__int__", "cpu")
    originals = {name: getattr(Tensor, name) for name in names}
    for name, original in originals.items():
        setattr(Tensor, name, watched(name, original))
    try:
        data = Data(train=samples(), batch_size=12)
        between_log_points = {"max_duration": "4step", "log_every": "4step"}
        train(DDPStrategy(device="cpu"), task, data, run_dir=f"{folder}/w", **between_log_points)
    finally:
        for name, original in originals.items():
            setattr(Tensor, name, original)
    refusals = []
    for first in (True, False):
        with pytest.raises(UserError) as raised:
            fit(DDPStrategy(device="cpu"), Forgetful(first=first), run_dir=f"{folder}/{first}")
        refusals.append(str(raised.value))
    return waits, refusals


def test_weights_returned_by_a_task_are_summed_on_the_device(tmp_path):
    for waits, (dropped, came) in run_ranks(waits_and_refusals, 2, str(tmp_path)):
        assert waits == []
        assert "returned no weight, but did in the first step" in dropped
        assert "returned a weight, but did not in the first step" in came


def trained_in_a_custom_group(folder: str) -> tuple[str, list[float]]:
    """Ranks 0 and 2 train together; rank 1 is not one of them."""
    rank = dist.get_rank()
    group = dist.new_group([0, 2])
    task = Regression()
    try:
        fit(DDPStrategy(device="cpu", process_group=group), task, run_dir=f"{folder}/{rank}")
    except UserError as error:
        return str(error), []
    return "", flat(task).tolist()


def test_a_custom_process_group_trains_by_itself(tmp_path):
    alone = Regression()
    fit(SingleStrategy(device="cpu"), alone, run_dir=tmp_path / "single")
    (_, first), (refused, _), (_, last) = run_ranks(trained_in_a_custom_group, 3, str(tmp_path))
    assert first == last
    assert (torch.tensor(first) - flat(alone)).abs().max() < 2e-5
    assert "only the ranks passed to torch.distributed.new_group" in refused


# ---- Started ranks


@pytest.mark.slow
def test_started_ranks_return_weights_metrics_and_predictions(tmp_path):
    alone, task = Regression(), Regression()
    fit(SingleStrategy(device="cpu"), alone, run_dir=tmp_path / "single")
    strategy = DDPStrategy(devices=2, device="cpu")
    fit(strategy, task, run_dir=tmp_path / "ddp")
    assert (flat(task) - flat(alone)).abs().max() < 2e-5
    trainer = Trainer(strategy=strategy, callbacks=[], loggers=[])
    predictions = trainer.predict(task, Data(predict=samples(), batch_size=12))
    assert torch.equal(predictions, samples().tensors[1])


class Failing(Regression):
    def training_step(self, batch: Any) -> Any:
        print(f"rank {dist.get_rank()} was here", flush=True)
        if dist.get_rank() == 1:
            raise ArithmeticError("rank 1 cannot go on")
        return super().training_step(batch)


@pytest.mark.slow
def test_the_error_of_a_started_rank_is_raised_with_its_traceback(tmp_path, capfd):
    with pytest.raises(ArithmeticError, match="rank 1 cannot go on") as raised:
        strategy = DDPStrategy(devices=2, device="cpu")
        strategy.log_dir = tmp_path
        fit(strategy, Failing(), run_dir=tmp_path)
    first, second = ((tmp_path / f"rank_{rank}.log").read_text() for rank in range(2))
    assert first.startswith("rank 0 was here\n")
    assert second.startswith("rank 1 was here\nTraceback")
    assert "ArithmeticError: rank 1 cannot go on" in second
    cause = str(raised.value.__cause__)
    assert "rank 1: Traceback" in cause
    assert "in training_step" in cause
    shown = capfd.readouterr()
    assert "rank 0 was here" in shown.out
    assert "Traceback" not in shown.err, "it is shown once, by whoever handles the exception"


def test_a_task_that_cannot_be_pickled_is_rejected_with_advice(tmp_path):
    task = Regression()
    task.lines = (line for line in ())
    with pytest.raises(UserError, match=r"Regression\.lines: cannot pickle 'generator' object.*on_fit_start"):
        fit(DDPStrategy(devices=2, device="cpu"), task, run_dir=tmp_path)


def test_a_task_that_is_frozen_whole_is_rejected_with_advice(tmp_path):
    task = Regression()
    task.requires_grad_(False)
    with pytest.raises(UserError, match=r"no parameter of Regression requires a gradient.*requires_grad_\(True\)"):
        fit(DDPStrategy(devices=1, device="cpu"), task, run_dir=tmp_path)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_missing_devices_are_rejected_before_a_process_starts():
    with pytest.raises(UserError, match="torch sees 0 CUDA devices"):
        DDPStrategy(devices=2, device="cuda").validate(Regression(), Precision())


class Slow(Fitting):
    """Leaves the pid of its rank in a folder, and takes time for a step."""

    def __init__(self, folder: str) -> None:
        super().__init__(nn.Linear(4, 1))
        self.folder = folder

    def training_step(self, batch: Any) -> Any:
        Path(self.folder, f"rank_{os.environ['RANK']}.pid").write_text(str(os.getpid()))
        time.sleep(0.05)
        return super().training_step(batch)


def train_slowly(folder: str, steps: int, devices: int | str) -> None:
    data = Data(train=TensorDataset(torch.randn(64, 4)), batch_size=4)
    strategy = DDPStrategy(devices=devices, device="cpu", on_rank_loss="stop")
    train(strategy, Slow(folder), data, max_duration=f"{steps}step", run_dir=folder)


@pytest.fixture
def training(tmp_path):
    """A program that trains on two ranks, the pids of these, and the file of its errors."""
    errors = tmp_path / "errors.txt"
    with errors.open("w") as file:
        caller = Program(train_slowly, str(tmp_path), 100_000, 2, streams=(0, 1, file.fileno()))
    with caller:
        files = [tmp_path / f"rank_{rank}.pid" for rank in range(2)]
        wait_until(
            lambda: all(file.exists() and file.read_text() for file in files),
            runs=lambda: caller.exit_code is None,
            said=errors.read_text,
        )
        yield caller, [int(file.read_text()) for file in files], errors


def wait_until_gone(pids: list[int]) -> None:
    wait_until(lambda: not any(map(is_running, pids)), said=lambda: f"{list(filter(is_running, pids))} still run")


@pytest.mark.slow
def test_no_rank_survives_a_killed_caller(training):
    caller, pids, _ = training
    os.kill(caller.pid, signal.SIGKILL)
    wait_until_gone(pids)


@pytest.mark.slow
def test_a_killed_rank_ends_the_others_and_is_named(training):
    caller, pids, errors = training
    os.kill(pids[1], signal.SIGKILL)
    assert caller.wait() == 1
    assert f"rank 1 (pid {pids[1]}) was killed by SIGKILL" in errors.read_text()
    wait_until_gone(pids)


@pytest.mark.slow
@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_a_signal_ends_all_ranks_after_the_same_step(training, number, code):
    caller, pids, errors = training
    os.kill(caller.pid, number)
    assert caller.wait() == code, errors.read_text()
    assert "Traceback" not in errors.read_text()
    wait_until_gone(pids)


@pytest.mark.slow
def test_torchrun_starts_the_ranks(tmp_path):
    command = ["--standalone", "--nproc-per-node=2", "-m", __name__, str(tmp_path)]
    errors = tmp_path / "errors.txt"
    with errors.open("w") as file, Program(torchrun.main, command, streams=(0, 1, file.fileno())) as program:
        assert program.wait() == 0, errors.read_text()
    assert {file.name for file in tmp_path.glob("*.pid")} == {"rank_0.pid", "rank_1.pid"}


if __name__ == "__main__":  # a rank of torchrun
    train_slowly(sys.argv[1], 3, "auto")
