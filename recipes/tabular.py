"""Residual network on a table of numbers, from scikit-learn or a CSV file.

It classifies tumors by 30 measurements with a validation accuracy of 98 % within a second.

Needs the extra `recipes`, without `data.csv`.
"""

from __future__ import annotations

import csv
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.optim import AdamW
from torch.optim.lr_scheduler import CosineAnnealingLR
from torch.utils.data import TensorDataset
from trainkit.recipes.digits import read_scikit_learn

from trainkit.data.data import Data
from trainkit.errors import UserError, nearest
from trainkit.storage import local_path
from trainkit.task import TaskModule

_FILES = {"breast_cancer": "breast_cancer.csv", "wine": "wine_data.csv", "iris": "iris.csv"}
_SPLIT_SEED = 2001  # The split is part of the task and independent of the run's seed.
_VALIDATION_FRACTION = 0.2


class TabularTask(TaskModule):
    """Classifies the rows of a table of numbers with residual blocks of two layers.

    There is no dropout and no batch norm, so that every strategy and every split of the batch gives the same weights.

    Args:
        columns: Numbers in a row: 30 in `breast_cancer`, 13 in `wine`, 4 in `iris`.
        classes: Number of classes: 2 in `breast_cancer`, 3 in `wine` and `iris`.
        width: Features of the residual stream.
        blocks: Number of blocks.
        lr: Initial learning rate; it decays to zero along a half cosine.
        weight_decay: Weight decay of AdamW.

    """

    def __init__(
        self,
        *,
        columns: int = 30,
        classes: int = 2,
        width: int = 64,
        blocks: int = 2,
        lr: float = 3e-3,
        weight_decay: float = 0.1,
    ) -> None:
        super().__init__()
        if columns < 1 or width < 1 or blocks < 0:
            raise UserError(
                f"task.columns and task.width must be at least 1 and task.blocks at least 0, got {columns}, {width} "
                f"and {blocks}."
            )
        if classes < 2:
            raise UserError(f"task.classes must be at least 2, got {classes}.")
        self.columns, self.lr, self.weight_decay = columns, lr, weight_decay
        self.enter = nn.Linear(columns, width)
        self.blocks = nn.ModuleList(_Block(width) for _ in range(blocks))
        self.leave = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, classes))

    def forward(self, rows: Tensor) -> Tensor:
        """Return the logits of rows of shape (batch, columns)."""
        if rows.shape[1] != self.columns:
            raise UserError(f"the table has {rows.shape[1]} columns; set task.columns={rows.shape[1]}.")
        features = self.enter(rows)  # (batch, width)
        for block in self.blocks:
            features = block(features)
        logits: Tensor = self.leave(features)  # (batch, classes)
        return logits

    def training_step(self, batch: Any) -> dict[str, Tensor]:
        """Return loss and accuracy."""
        logits, classes = self(batch[0]), batch[1]
        return {
            "loss": functional.cross_entropy(logits, classes),
            "accuracy": (logits.argmax(dim=1) == classes).float().mean(),
        }

    validation_step = training_step

    def predict_step(self, batch: Any) -> Tensor:
        """Return the most likely class of each row."""
        return torch.argmax(self(batch[0]), dim=1)

    def configure_optimizers(self, total_steps: int) -> tuple[AdamW, CosineAnnealingLR]:
        """Return AdamW with a learning rate that decays to zero along a half cosine."""
        optimizer = AdamW(self.parameters(), lr=self.lr, weight_decay=self.weight_decay)
        return optimizer, CosineAnnealingLR(optimizer, T_max=total_steps)


class TableData(Data):
    """Rows of a table and their classes, always split in the same way: a fifth validates.

    Columns are standardized by the mean and standard deviation of the training rows.

    Args:
        table: Table of scikit-learn.
        csv: CSV file instead: a line of names, then lines of numbers, with the class in the last column.
        batch_size: Rows of one optimizer step, over all ranks.
        evaluation_batch_size: Rows of one evaluation batch, over all ranks.
        num_workers: Worker processes that read samples; 0: the training process.

    """

    def __init__(
        self,
        *,
        table: Literal["breast_cancer", "wine", "iris"] = "breast_cancer",
        csv: str | None = None,
        batch_size: int = 32,
        evaluation_batch_size: int = 256,
        num_workers: int = 0,
    ) -> None:
        super().__init__(batch_size=batch_size, evaluation_batch_size=evaluation_batch_size, num_workers=num_workers)
        if table not in _FILES:
            raise UserError(f"unknown data.table={table!r}.{nearest(table, _FILES)}")
        self.table, self.csv = table, csv

    def dataset(self, stage: str) -> TensorDataset:
        """Return the rows of a stage; test and predict use the validation rows."""
        train, validation = self._splits
        return train if stage == "train" else validation

    @cached_property
    def _splits(self) -> tuple[TensorDataset, TensorDataset]:
        """Return the training and the validation rows with their classes."""
        csv = None if self.csv is None else local_path(self.csv, what="data.csv")
        if csv is None:
            table = read_scikit_learn(_FILES[self.table], header_lines=1)
            rows, classes = table[:, :-1], table[:, -1].long()
        else:
            rows, classes = _read_csv(csv)
        order = torch.randperm(len(rows), generator=torch.Generator().manual_seed(_SPLIT_SEED))
        rows, classes = rows[order], classes[order]
        count = max(1, round(_VALIDATION_FRACTION * len(rows)))
        trained = rows[count:]
        deviation = trained.std(dim=0).clamp(min=1e-9)  # a constant column has none
        rows = ((rows - trained.mean(dim=0)) / deviation).float()
        return TensorDataset(rows[count:], classes[count:]), TensorDataset(rows[:count], classes[:count])


def _read_csv(path: Path) -> tuple[Tensor, Tensor]:
    """Return the numbers of a file, and the classes in the last column, numbered in sorted order."""
    if not path.is_file():
        raise UserError(f"data.csv={path} is not a file.{nearest(path.name, [p.name for p in path.parent.glob('*')])}")
    with path.open(newline="", encoding="utf-8") as file:
        lines = list(csv.reader(file))
    if len(lines) < 3 or len(lines[0]) < 2:
        raise UserError(f"data.csv={path} needs a line of names and two or more of numbers, with the class at the end.")
    rows = []
    for number, line in enumerate(lines[1:], start=2):
        try:
            rows.append([float(value) for value in line[:-1]])
        except ValueError as error:
            raise UserError(f"{path}:{number}: {error}; every column but the last holds numbers.") from None
        if len(line) != len(lines[0]):
            raise UserError(f"{path}:{number}: {len(line)} values, but there are {len(lines[0])} names.")
    names = sorted({line[-1] for line in lines[1:]})
    classes = [names.index(line[-1]) for line in lines[1:]]
    # In float64 until the columns are standardized: large numbers with small differences would lose them.
    return torch.tensor(rows, dtype=torch.float64), torch.tensor(classes, dtype=torch.int64)


class _Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.widen = nn.Linear(width, 2 * width)
        self.shrink = nn.Linear(2 * width, width)

    def forward(self, features: Tensor) -> Tensor:
        """Return features of the same shape, (batch, width)."""
        added: Tensor = self.shrink(functional.relu(self.widen(self.norm(features))))
        return features + added
