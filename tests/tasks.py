"""Small tasks, data, callbacks and loggers that several tests share."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import IterableDataset, TensorDataset

from trainkit import Callback, Data, Logger, Strategy, TaskModule, Trainer, registry
from trainkit.distributed.collectives import Collectives
from trainkit.trainer import FitResult

WIDTH = 4


def regression_data(num_samples: int, *, seed: int = 0, dtype: torch.dtype = torch.float32) -> TensorDataset:
    """Random inputs of four features, and a target that a linear layer can learn."""
    generator = torch.Generator().manual_seed(seed)
    inputs = torch.randn(num_samples, WIDTH, generator=generator, dtype=dtype)
    noise = torch.randn(num_samples, 1, generator=generator, dtype=dtype)
    return TensorDataset(inputs, inputs.sum(1, keepdim=True) + 0.1 * noise)


def data(num_samples: int = 32, num_validation: int = 8, *, batch_size: int = 8, **settings: Any) -> Data:
    """Samples of `regression_data` to train with, and others for validation."""
    sets = {"train": regression_data(num_samples), "validation": regression_data(num_validation, seed=1)}
    return Data(batch_size=batch_size, **{**sets, **settings})


class NumberStream(IterableDataset[Tensor]):
    """The numbers 0, 1, 2, ... as scalar tensors, without a length."""

    def __init__(self, num_samples: int) -> None:
        self.num_samples = num_samples
        self.read = 0

    def __iter__(self) -> Iterator[Tensor]:
        for number in range(self.num_samples):
            self.read += 1
            yield torch.tensor(float(number))


class RegressionStream(IterableDataset[tuple[Tensor, ...]]):
    """The samples of `regression_data` one after the other, without a length."""

    def __init__(self, num_samples: int) -> None:
        self.samples = regression_data(num_samples)

    def __iter__(self) -> Iterator[tuple[Tensor, ...]]:
        return (self.samples[index] for index in range(len(self.samples)))


def sgd(task: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(task.parameters(), lr=0.05, momentum=0.9)


def adamw(task: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(task.parameters(), lr=0.01)


def seeded(make: Callable[[], nn.Module], seed: int = 0) -> nn.Module:
    """Make a module with the same weights in every process, and leave the generator as it was."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return make()


class Fitting(TaskModule):
    """Fits what `net` returns to the second tensor of a batch, or to zero in a batch of one."""

    def __init__(self, net: nn.Module, optimizer: Callable[[TaskModule], Any] | None = None) -> None:
        super().__init__()
        self.net, self._optimizer = net, optimizer

    def training_step(self, batch: Any) -> Any:
        outputs = self.net(batch[0])
        return (outputs if len(batch) == 1 else outputs - batch[1]).square().mean()

    def configure_optimizers(self) -> Any:
        return self._optimizer(self) if self._optimizer else torch.optim.SGD(self.parameters(), lr=0.1)


class Regression(TaskModule):
    """Fits a line, or with `hidden` a small network with dropout; the same weights for the same `init_seed`."""

    def __init__(
        self,
        optimizer: Callable[[TaskModule], Any] | None = None,
        *,
        hidden: int = 0,
        dropout: float = 0.0,
        init_seed: int = 0,
    ) -> None:
        super().__init__()
        self._optimizer = optimizer
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(init_seed)
            self.network = (
                nn.Sequential(nn.Linear(WIDTH, hidden), nn.Tanh(), nn.Dropout(dropout), nn.Linear(hidden, 1))
                if hidden
                else nn.Sequential(nn.Linear(WIDTH, 1))
            )

    def forward(self, inputs: Tensor) -> Tensor:
        return self.network(inputs)

    def training_step(self, batch: Any) -> Any:
        inputs, targets = batch
        return nn.functional.mse_loss(self(inputs), targets)

    def validation_step(self, batch: Any) -> Any:
        inputs, targets = batch
        error = self(inputs) - targets
        return {"loss": error.square().mean(), "absolute": error.abs().mean()}

    def predict_step(self, batch: Any) -> Any:
        return self(batch[0])

    def configure_optimizers(self) -> Any:
        return self._optimizer(self) if self._optimizer else torch.optim.SGD(self.parameters(), lr=0.05)


class WeightedRegression(Regression):
    """Every sample counts as much as its third tensor says: a mean over tokens, not over samples."""

    def training_step(self, batch: Any) -> Any:
        inputs, targets, tokens = batch
        losses = (self(inputs) - targets).square().squeeze(1)
        return {"loss": (losses * tokens).sum() / tokens.sum(), "weight": tokens.sum()}

    validation_step = training_step


def weighted_data(num_samples: int) -> TensorDataset:
    """`regression_data` with a number of tokens for each sample."""
    inputs, targets = regression_data(num_samples).tensors
    tokens = 1.0 + torch.arange(num_samples) * 7 % 5
    return TensorDataset(inputs, targets, tokens)


def fit(
    strategy: Any, task: TaskModule, data: Data, *callbacks: Callback, resume: Any = None, **settings: Any
) -> FitResult:
    """Train with these callbacks and without loggers, as on a rank, which has no fixtures."""
    settings = {"callbacks": [*callbacks], "loggers": [], "num_sanity_batches": 0, **settings}
    return Trainer(strategy, **settings).fit(task, data, resume=resume)


class Seen(Regression):
    """Keeps the batches of its steps."""

    def __init__(self, *args: Any, **settings: Any) -> None:
        super().__init__(*args, **settings)
        self.trained, self.validated, self.predicted = list[Any](), list[Any](), list[Any]()
        self.keep = self.trained.append  # a step must not use a list that it changes

    def training_step(self, batch: Any) -> Any:
        self.keep(batch)
        return super().training_step(batch)

    def validation_step(self, batch: Any) -> Any:
        self.validated.append(batch)
        return super().validation_step(batch)

    def predict_step(self, batch: Any) -> Any:
        self.predicted.append(batch)
        return super().predict_step(batch)


def on_cpu(name: str, **settings: Any) -> Any:
    """Return the strategy of a name on the CPU; `dp` has two replicas."""
    where: dict[str, Any] = {"devices": ["cpu", "cpu"]} if name == "dp" else {"device": "cpu"}
    return registry.make("strategy", name, {**where, **settings})


class FakeRank(Strategy):
    """A strategy that says it is one rank of several, for code that only asks who reads what."""

    def __init__(self, rank: int = 0, world_size: int = 1, **settings: Any) -> None:
        super().__init__(device="cpu", **settings)
        self.comm = Collectives(rank=rank, world_size=world_size)


class AtStep(Callback):
    """Calls a function with the run after a step, before the callbacks behind it."""

    def __init__(self, step: int, function: Callable[[Any], object]) -> None:
        self.step, self.function = step, function

    def on_step_end(self, run: Any) -> None:
        if run.state.step == self.step:
            self.function(run)


class EachStep(Callback):
    """Keeps what a function returns of the run after each step."""

    def __init__(self, look: Callable[[Any], Any]) -> None:
        self.look, self.seen = look, list[Any]()

    def on_step_end(self, run: Any) -> None:
        self.seen.append(self.look(run))


def wait_for_saves(run: Any = None) -> None:
    """Wait for the threads that write checkpoints in the background."""
    for thread in threading.enumerate():
        if thread.name.startswith("checkpoint-"):
            thread.join(120)


class SkipStep(Callback):
    """Lists a step to be skipped before training begins."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_fit_start(self, run: Any) -> None:
        run.state.skipped_steps.add(self.step)


class StopAt(Callback):
    """Saves a checkpoint after a step and asks the run to stop."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_step_complete(self, run: Any) -> None:
        if run.state.step == self.step:
            run.checkpointer.save(reason="test")
            run.request_stop("test")


class SaveAtEnd(Callback):
    """Saves when training ends, for whatever reason."""

    def on_fit_end(self, run: Any) -> None:
        run.checkpointer.save(reason="end")


class Recorder(Callback):
    """Notes every moment with the step at which it came."""

    def __init__(self) -> None:
        self.moments: list[tuple[str, int]] = []
        self.logged: list[dict[str, float]] = []
        self.evaluations: list[tuple[int, str, dict[str, float]]] = []
        self.run: Any = None

    def steps_of(self, moment: str) -> list[int]:
        return [step for name, step in self.moments if name == moment]

    def on_fit_start(self, run: Any) -> None:
        self.run = run
        self.moments.append(("on_fit_start", run.state.step))

    def on_fit_end(self, run: Any) -> None:
        self.moments.append(("on_fit_end", run.state.step))

    def on_epoch_start(self, run: Any) -> None:
        self.moments.append(("on_epoch_start", run.state.step))

    def on_epoch_end(self, run: Any) -> None:
        self.moments.append(("on_epoch_end", run.state.step))

    def on_step_end(self, run: Any) -> None:
        self.moments.append(("on_step_end", run.state.step))

    def on_log(self, run: Any, metrics: dict[str, float]) -> None:
        self.moments.append(("on_log", run.state.step))
        self.logged.append(dict(metrics))

    def on_evaluation_start(self, run: Any, stage: str) -> None:
        self.moments.append((f"on_evaluation_start {stage}", run.state.step))

    def on_evaluation_end(self, run: Any, stage: str, metrics: dict[str, float]) -> None:
        self.moments.append((f"on_evaluation_end {stage}", run.state.step))
        self.evaluations.append((run.state.step, stage, dict(metrics)))

    def on_save(self, run: Any, payload: dict[str, Any]) -> None:
        self.moments.append(("on_save", run.state.step))

    def on_exception(self, run: Any, error: BaseException) -> None:
        self.moments.append((f"on_exception {type(error).__name__}", run.state.step))

    def close(self) -> None:
        self.moments.append(("close", self.run.state.step if self.run else 0))


class Clock:
    """Stands in for a function of the module time; advances only by `sleep`."""

    now = 0.0

    def __call__(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


class MemoryLogger(Logger):
    """Keeps what it was told."""

    def __init__(self) -> None:
        self.opened: list[tuple[Path, int]] = []
        self.rows: list[tuple[int, dict[str, float]]] = []
        self.closed = 0

    def open(self, folder: Path, *, step: int) -> None:
        self.opened.append((folder, step))

    def write(self, metrics: Mapping[str, float], *, step: int) -> None:
        self.rows.append((step, dict(metrics)))

    def close(self) -> None:
        self.closed += 1


def weights(task: nn.Module) -> dict[str, Tensor]:
    """Return copies of a task's parameters and buffers."""
    return {name: tensor.detach().clone() for name, tensor in task.state_dict().items()}


def flat(task: nn.Module) -> Tensor:
    """Return a copy of all parameters as one vector."""
    return torch.cat([parameter.detach().flatten() for parameter in task.parameters()])


def distance(task: nn.Module, other: nn.Module) -> float:
    """Return the largest difference between the parameters and buffers of two tasks."""
    state, expected = task.state_dict(), other.state_dict()
    assert list(state) == list(expected)
    return max((state[name].double() - expected[name].double()).abs().max().item() for name in state)


def assert_same_bits(actual: nn.Module | Mapping[str, Tensor], expected: nn.Module | Mapping[str, Tensor]) -> None:
    """Fail unless two tasks hold exactly the same numbers."""
    left = actual.state_dict() if isinstance(actual, nn.Module) else actual
    right = expected.state_dict() if isinstance(expected, nn.Module) else expected
    assert list(left) == list(right)
    for name, tensor in left.items():
        assert torch.equal(tensor, right[name]), f"{name}: {tensor} is not {right[name]}"


def assert_close(actual: nn.Module, expected: nn.Module, *, rtol: float = 1e-5, atol: float = 1e-6) -> None:
    """Fail unless two tasks hold the same numbers to float tolerance."""
    for name, tensor in actual.state_dict().items():
        torch.testing.assert_close(tensor, expected.state_dict()[name], rtol=rtol, atol=atol, msg=name)
