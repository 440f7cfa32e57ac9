"""Contrastive learning of image features from handwritten digits, without labels.

A linear classifier on the features reaches an accuracy of 91 % with 50 labels, and of 98 % with all 1437.

Needs the extra `recipes`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.optim import AdamW
from torch.optim.lr_scheduler import CosineAnnealingLR
from torch.utils.data import Dataset
from trainkit.recipes.digits import DigitsData

from trainkit.errors import UserError
from trainkit.task import TaskModule


class ContrastiveTask(TaskModule):
    """Pulls the features of two views of an image together, and pushes those of other images apart.

    Each image is compared with the others of its micro-batch, so the number of ranks and micro-batches changes the
    task; a fixed `strategy.micro_batch_size` keeps the number of comparisons.

    Args:
        width: Channels of the first stage; the second has twice as many.
        features: Size of the feature vector of an image.
        temperature: Temperature of the softmax; lower values weight the most similar images more.
        lr: Initial learning rate; it decays to zero along a half cosine.
        weight_decay: Weight decay of AdamW.

    """

    def __init__(
        self,
        *,
        width: int = 32,
        features: int = 64,
        temperature: float = 0.2,
        lr: float = 3e-3,
        weight_decay: float = 0.01,
    ) -> None:
        super().__init__()
        if width < 1 or features < 1:
            raise UserError(f"task.width and task.features must be at least 1, got {width} and {features}.")
        if not temperature > 0:
            raise UserError(f"task.temperature must be above 0, got {temperature}.")
        self.temperature, self.lr, self.weight_decay = temperature, lr, weight_decay
        self.encoder = nn.Sequential(
            *_stage(1, width),  # (batch, width, 4, 4)
            *_stage(width, 2 * width),  # (batch, 2 * width, 2, 2)
            nn.Flatten(),
            nn.Linear(8 * width, features),
        )
        # Views are compared after this projection, so that the features may keep what the views differ in.
        self.projector = nn.Sequential(nn.ReLU(), nn.Linear(features, features))

    def forward(self, images: Tensor) -> Tensor:
        """Return the features of images of shape (batch, 1, 8, 8), shape (batch, features)."""
        features: Tensor = self.encoder(images)
        return features

    def training_step(self, batch: Any) -> dict[str, Tensor]:
        """Return the contrastive loss, and the fraction of views whose nearest neighbor is their partner."""
        first, second = batch
        count = len(first)
        views = functional.normalize(self.projector(self(torch.cat([first, second]))), dim=1)  # (2 * batch, features)
        itself = torch.eye(2 * count, dtype=torch.bool, device=views.device)
        similarity = (views @ views.T / self.temperature).masked_fill(itself, float("-inf"))
        partners = torch.arange(2 * count, device=views.device).roll(count)
        return {
            "loss": functional.cross_entropy(similarity, partners),
            "matched": (similarity.argmax(dim=1) == partners).float().mean(),
        }

    validation_step = training_step

    def predict_step(self, batch: Any) -> Tensor:
        """Return the features of each image, shape (batch, features)."""
        features: Tensor = self(batch[0])
        return features

    def configure_optimizers(self, total_steps: int) -> tuple[AdamW, CosineAnnealingLR]:
        """Return AdamW with a learning rate that decays to zero along a half cosine."""
        optimizer = AdamW(self.parameters(), lr=self.lr, weight_decay=self.weight_decay)
        return optimizer, CosineAnnealingLR(optimizer, T_max=total_steps)


class TwoViews(Dataset[tuple[Tensor, Tensor]]):
    """Two random views of each image, which depend on the seed of the sample only, not on workers or ranks.

    Args:
        images: Shape (images, 1, 8, 8).
        shift: Maximum shift of a view, in pixels.
        noise: Standard deviation of the noise of a pixel.

    """

    def __init__(self, images: Tensor, *, shift: int, noise: float) -> None:
        self.images, self.shift, self.noise = images, shift, noise

    def __len__(self) -> int:
        return len(self.images)

    def get_sample(self, index: int, seed: int) -> tuple[Tensor, Tensor]:
        """Return both views of the image at `index`."""
        generator = torch.Generator().manual_seed(seed)
        return self._view(self.images[index], generator), self._view(self.images[index], generator)

    def _view(self, image: Tensor, generator: torch.Generator) -> Tensor:
        """Return the image shifted, with random brightness and noise."""
        side = image.shape[-1]
        padded = functional.pad(image, [self.shift] * 4, value=-1.0)
        top, left = torch.randint(0, 2 * self.shift + 1, (2,), generator=generator).tolist()
        view = padded[:, top : top + side, left : left + side]
        view = (view + 1) * (0.6 + 0.8 * torch.rand((), generator=generator)) - 1
        return view + self.noise * torch.randn(view.shape, generator=generator)


class DigitViews(DigitsData):
    """Two views of each image of `digits`, without labels. Predictions use the plain images.

    Args:
        shift: Maximum shift of a view, in pixels.
        noise: Standard deviation of the noise of a pixel.

    """

    def __init__(
        self,
        *,
        batch_size: int = 128,
        evaluation_batch_size: int = 120,
        shift: int = 1,
        noise: float = 0.1,
        num_train: int | None = None,
        num_workers: int = 0,
    ) -> None:
        super().__init__(
            batch_size=batch_size,
            evaluation_batch_size=evaluation_batch_size,
            num_train=num_train,
            num_workers=num_workers,
        )
        if not 0 <= shift < 4 or noise < 0:
            raise UserError(f"data.shift must be from 0 to 3 and data.noise at least 0, got {shift} and {noise}.")
        self.shift, self.noise = shift, noise

    def dataset(self, stage: str) -> Any:
        """Return the views of a stage; test and predict use the validation images."""
        digits = super().dataset(stage)
        return digits if stage == "predict" else TwoViews(digits.tensors[0], shift=self.shift, noise=self.noise)


def _stage(channels_in: int, channels: int) -> list[nn.Module]:
    """Return a convolution with group norm, then a pooling that halves height and width."""
    return [
        nn.Conv2d(channels_in, channels, kernel_size=3, padding=1, bias=False),
        nn.GroupNorm(1, channels),
        nn.ReLU(),
        nn.MaxPool2d(2),
    ]
