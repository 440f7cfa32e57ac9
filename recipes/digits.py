"""Small convolutional network on handwritten digits, with a validation accuracy of 99 % within seconds.

The 1797 images of 8 x 8 pixels are part of scikit-learn. Nothing is downloaded.

Needs the extra `recipes`.
"""

from __future__ import annotations

from functools import cached_property
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.optim import AdamW
from torch.optim.lr_scheduler import CosineAnnealingLR
from torch.utils.data import TensorDataset

from trainkit.data.data import Data
from trainkit.errors import UserError
from trainkit.task import TaskModule

NUM_CLASSES = 10
_NUM_VALIDATION = 360
_SPLIT_SEED = 2001  # The split is part of the task and independent of the run's seed.


class DigitsTask(TaskModule):
    """Classifies images of shape (1, 8, 8) with two stages of convolutions.

    There is no dropout and no batch norm, so that every strategy and every split of the batch gives the same weights.

    Args:
        width: Channels of the first stage; the second has twice as many.
        lr: Initial learning rate; it decays to zero along a half cosine.
        weight_decay: Weight decay of AdamW.

    """

    def __init__(self, *, width: int = 32, lr: float = 3e-3, weight_decay: float = 0.1) -> None:
        super().__init__()
        if width < 1:
            raise UserError(f"task.width must be at least 1 channel, got {width}.")
        self.lr, self.weight_decay = lr, weight_decay
        self.network = nn.Sequential(
            *_stage(1, width),  # (batch, width, 4, 4)
            *_stage(width, 2 * width),  # (batch, 2 * width, 2, 2)
            nn.Flatten(),
            nn.Linear(8 * width, NUM_CLASSES),
        )

    def forward(self, images: Tensor) -> Tensor:
        """Return the logits of images of shape (batch, 1, 8, 8)."""
        logits: Tensor = self.network(images)  # (batch, 10)
        return logits

    def training_step(self, batch: Any) -> dict[str, Tensor]:
        """Return loss and accuracy."""
        return measure(self(batch[0]), batch[1])

    validation_step = training_step

    def predict_step(self, batch: Any) -> Tensor:
        """Return the most likely digit of each image."""
        return torch.argmax(self(batch[0]), dim=1)

    def configure_optimizers(self, total_steps: int) -> tuple[AdamW, CosineAnnealingLR]:
        """Return AdamW with a learning rate that decays to zero along a half cosine."""
        optimizer = AdamW(self.parameters(), lr=self.lr, weight_decay=self.weight_decay)
        return optimizer, CosineAnnealingLR(optimizer, T_max=total_steps)


class DigitsData(Data):
    """Images and their digits, always split in the same way: 1437 train, the other 360 validate.

    Args:
        batch_size: Samples of one optimizer step, over all ranks.
        evaluation_batch_size: Samples of one evaluation batch, over all ranks.
        num_train: Maximum number of training images.
        num_workers: Worker processes that read samples; 0: the training process.

    """

    def __init__(
        self,
        *,
        batch_size: int = 64,
        evaluation_batch_size: int = 360,
        num_train: int | None = None,
        num_workers: int = 0,
    ) -> None:
        super().__init__(batch_size=batch_size, evaluation_batch_size=evaluation_batch_size, num_workers=num_workers)
        if num_train is not None and num_train < 1:
            raise UserError(f"data.num_train must be at least 1 image, got {num_train}.")
        self.num_train = num_train

    def dataset(self, stage: str) -> TensorDataset:
        """Return the images of a stage; test and predict use the validation images."""
        images, digits = self._images_and_digits
        if stage == "train":
            return TensorDataset(images[_NUM_VALIDATION:][: self.num_train], digits[_NUM_VALIDATION:][: self.num_train])
        return TensorDataset(images[:_NUM_VALIDATION], digits[:_NUM_VALIDATION])

    @cached_property
    def _images_and_digits(self) -> tuple[Tensor, Tensor]:
        """Return all images, shape (1797, 1, 8, 8), and their digits; the validation images come first."""
        table = read_scikit_learn("digits.csv.gz", header_lines=0)  # 64 pixels and the digit
        images = table[:, :-1].float().view(-1, 1, 8, 8) / 8 - 1  # pixels in [-1, 1]
        order = torch.randperm(len(images), generator=torch.Generator().manual_seed(_SPLIT_SEED))
        return images[order], table[:, -1].long()[order]


def read_scikit_learn(filename: str, *, header_lines: int) -> Tensor:
    """Return the numbers of a table that is part of scikit-learn, in fp64; the last column holds the classes.

    scikit-learn is not imported: that takes every rank a second.
    """
    package = find_spec("sklearn")
    if package is None or not package.submodule_search_locations:
        raise UserError(
            f"{filename} is in scikit-learn, which is not installed; type: pip install 'trainkit-torch[recipes]'"
        )
    path = Path(package.submodule_search_locations[0], "datasets", "data", filename)
    return torch.from_numpy(numpy.loadtxt(path, delimiter=",", skiprows=header_lines))


def measure(logits: Tensor, digits: Tensor) -> dict[str, Tensor]:
    """Return loss and accuracy of logits of shape (batch, 10)."""
    return {
        "loss": functional.cross_entropy(logits, digits),
        "accuracy": (logits.argmax(dim=1) == digits).float().mean(),
    }


def _stage(channels_in: int, channels: int) -> list[nn.Module]:
    """Return two convolutions with group norm, then a pooling that halves height and width."""
    return [
        nn.Conv2d(channels_in, channels, kernel_size=3, padding=1, bias=False),
        nn.GroupNorm(1, channels),
        nn.ReLU(),
        nn.Conv2d(channels, channels, kernel_size=3, padding=1, bias=False),
        nn.GroupNorm(1, channels),
        nn.ReLU(),
        nn.MaxPool2d(2),
    ]
