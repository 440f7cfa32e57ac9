from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset
from trainkit.strategies.single import SingleStrategy

from tests.tasks import MemoryLogger
from trainkit.callback import Callback
from trainkit.data.data import Data
from trainkit.task import TaskModule
from trainkit.trainer import FitResult, Trainer


class Scripted(TaskModule):
    """A linear model with dropout whose validations return the given losses, one after the other."""

    def __init__(self, validation: Sequence[float] = ()) -> None:
        super().__init__()
        self.net = nn.Linear(4, 1)
        self.dropout = nn.Dropout(0.2)
        self.validation = list(validation)
        self.at_step: dict[int, Callable[[], object]] = {}
        self.steps = 0

    def training_step(self, batch: Any) -> Tensor:
        self.steps += 1
        self.at_step.get(self.steps, lambda: None)()
        features, target = batch
        return nn.functional.mse_loss(self.net(self.dropout(features)), target)

    def validation_step(self, batch: Any) -> dict[str, Tensor]:
        value = self.validation.pop(0) if self.validation else 1.0
        return {"loss": torch.tensor(value), "accuracy": torch.tensor(0.5)}

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)


class MediaLogger(MemoryLogger):
    """Keeps the texts, histograms and graphs that a run writes."""

    def __init__(self) -> None:
        super().__init__()
        self.texts: list[tuple[str, str, int]] = []
        self.histograms: list[tuple[str, Any, int]] = []
        self.graphs: list[Any] = []

    def write_text(self, name: str, text: str, *, step: int) -> None:
        self.texts.append((name, text, step))

    def write_histogram(self, name: str, histogram: Any, *, step: int) -> None:
        self.histograms.append((name, histogram, step))

    def write_graph(self, graph: Any) -> None:
        self.graphs.append(graph)


@pytest.fixture
def media_logger() -> MediaLogger:
    return MediaLogger()


@pytest.fixture
def scripted() -> type[Scripted]:
    return Scripted


@pytest.fixture
def data() -> Data:
    """Ten steps an epoch; a validation is one batch."""
    generator = torch.Generator().manual_seed(0)
    features = torch.randn(40, 4, generator=generator)
    dataset = TensorDataset(features, features.sum(1, keepdim=True))
    return Data(train=dataset, validation=TensorDataset(features[:4], features[:4, :1]), batch_size=4)


@pytest.fixture
def fit(data: Data, tmp_path: Path) -> Callable[..., FitResult]:
    """Train 20 steps, validating after every second one, with the callbacks that are given and no others."""

    def run(
        task: TaskModule,
        *callbacks: Callback,
        resume: Path | None = None,
        without_validation: bool = False,
        **settings: Any,
    ) -> FitResult:
        torch.manual_seed(0)
        used = Data(train=data.stage_data("train").dataset, batch_size=4) if without_validation else data
        defaults = {"max_duration": "20step", "evaluate_every": "2step", "log_every": "5step", "num_sanity_batches": 0}
        settings = {"run_dir": tmp_path / "run", "loggers": [], **defaults, **settings}
        strategy = settings.pop("strategy", None) or SingleStrategy(device="cpu")
        return Trainer(strategy, callbacks=callbacks, **settings).fit(task, used, resume=resume)

    return run
