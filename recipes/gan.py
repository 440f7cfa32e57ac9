"""Handwritten digits that nobody has written: a generator and a discriminator, trained in two phases of each step."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.optim import Adam
from torch.utils.data import Dataset, TensorDataset
from trainkit.recipes.digits import NUM_CLASSES, DigitsData

from trainkit.errors import UserError
from trainkit.metrics.metric import Metric
from trainkit.optim.phase import Phase
from trainkit.task import TaskModule

NUM_PIXELS = 64
NUM_LATENT = 16


class DigitsGAN(TaskModule):
    """Generates images of shape (1, 8, 8) of a digit that is asked for (Goodfellow et al., 2014; Mirza, 2014).

    Each step first trains the discriminator to tell the images of the data set from generated ones, then the
    generator to be taken for the data set. The noise comes with each sample, so that every strategy sees the same.

    Args:
        width: Units of the hidden layers of both networks.
        lr: Learning rate of Adam in both phases.
        penalty: How much the discriminator's slope at true images counts, without which it soon knows them by heart
            (Mescheder et al., 2018).
        generator_every: Steps for each of the generator's.

    """

    def __init__(self, *, width: int = 128, lr: float = 1e-3, penalty: float = 10.0, generator_every: int = 1) -> None:
        super().__init__()
        if width < 1:
            raise UserError(f"task.width must be at least 1 unit, got {width}.")
        self.lr = lr
        self.penalty = penalty
        self.generator_every = generator_every
        self.generator = nn.Sequential(
            nn.Linear(NUM_LATENT + NUM_CLASSES, width),
            nn.ReLU(),
            nn.Linear(width, width),
            nn.LayerNorm(width),
            nn.ReLU(),
            nn.Linear(width, NUM_PIXELS),
            nn.Tanh(),
        )
        self.discriminator = nn.Sequential(
            nn.Linear(NUM_PIXELS + NUM_CLASSES, width),
            nn.LeakyReLU(0.2),
            nn.Linear(width, width),
            nn.LeakyReLU(0.2),
            nn.Linear(width, 1),
        )
        self.distance = FrechetDistance(NUM_PIXELS)

    def forward(self, noise: Tensor, digits: Tensor) -> Tensor:
        """Return images of shape (batch, 1, 8, 8), from noise of shape (batch, 16) and the digits they are to show."""
        pixels: Tensor = self.generator(torch.cat([noise, _one_hot(digits, noise)], dim=1))  # (batch, 64)
        return pixels.view(-1, 1, 8, 8)

    def discriminator_step(self, batch: Any) -> dict[str, Tensor]:
        """Return the loss of telling true images from generated ones, and how often that is right."""
        images, digits, noise = batch
        with torch.no_grad():
            generated = self(noise, digits)
        images = images.detach().requires_grad_()
        true, false = self._judge(images, digits), self._judge(generated, digits)
        loss = functional.softplus(-true).mean() + functional.softplus(false).mean()
        (slope,) = torch.autograd.grad(true.sum(), images, create_graph=True)  # (batch, 1, 8, 8)
        loss = loss + self.penalty / 2 * slope.square().sum(dim=(1, 2, 3)).mean()
        return {"loss": loss, "accuracy": torch.cat([true > 0, false < 0]).float().mean()}

    def generator_step(self, batch: Any) -> Tensor:
        """Return the loss of being taken for true."""
        _, digits, noise = batch
        return functional.softplus(-self._judge(self(noise, digits), digits)).mean()

    def validation_step(self, batch: Any) -> dict[str, Any]:
        """Return how far generated images are from true ones, over the whole pass."""
        images, digits, noise = batch
        self.distance.update(images.flatten(1), self(noise, digits).flatten(1))
        return {"distance": self.distance}

    def predict_step(self, batch: Any) -> Tensor:
        """Return one generated image for each sample, of its digit."""
        _, digits, noise = batch
        images: Tensor = self(noise, digits)
        return images

    def configure_phases(self) -> list[Phase]:
        """Return the two phases of a step."""
        betas = (0.5, 0.999)  # a short memory of the gradient, as the opponent changes (Radford et al., 2015)
        return [
            Phase("discriminator", Adam(self.discriminator.parameters(), lr=self.lr, betas=betas)),
            Phase(
                "generator",
                Adam(self.generator.parameters(), lr=self.lr, betas=betas),
                every=self.generator_every,
            ),
        ]

    def _judge(self, images: Tensor, digits: Tensor) -> Tensor:
        """Return how true images look, above 0 for true; shape (batch,)."""
        pixels = images.flatten(1)
        judged: Tensor = self.discriminator(torch.cat([pixels, _one_hot(digits, pixels)], dim=1))
        return judged.squeeze(1)


class DigitsWithNoise(DigitsData):
    """The images of `digits`, each with its digit and noise that follows from the seed, the epoch and the sample.

    Args:
        batch_size: Samples of one optimizer step, over all ranks.
        evaluation_batch_size: Samples of one evaluation batch, over all ranks.
        num_train: Images to train on, at most.
        num_workers: Processes that read; 0: the training process.

    """

    def dataset(self, stage: str) -> Any:
        """Return the images of a stage with their noise."""
        return _WithNoise(super().dataset(stage))


class FrechetDistance(Metric):
    """How far two sets of points are apart, taken for normal distributions; 0 for the same (Fréchet, 1957).

    Args:
        size: Coordinates of a point.

    """

    def __init__(self, size: int) -> None:
        super().__init__()
        for name in ("true", "false"):
            self.add_state(f"{name}_count", torch.zeros((), dtype=torch.float64))
            self.add_state(f"{name}_sum", torch.zeros(size, dtype=torch.float64))
            self.add_state(f"{name}_products", torch.zeros(size, size, dtype=torch.float64))

    def update(self, true: Tensor, false: Tensor) -> None:
        """Add points of both sets, each of shape (batch, size)."""
        for name, points in (("true", true.double()), ("false", false.double())):
            setattr(self, f"{name}_count", getattr(self, f"{name}_count") + len(points))
            setattr(self, f"{name}_sum", getattr(self, f"{name}_sum") + points.sum(dim=0))
            setattr(self, f"{name}_products", getattr(self, f"{name}_products") + points.T @ points)

    def compute(self) -> Tensor:
        """Return the squared distance of the means, and what the covariances differ by."""
        true_mean, true_covariance = self._moments("true")
        false_mean, false_covariance = self._moments("false")
        # The trace of the root of a product is the sum of the roots of its eigenvalues.
        roots = torch.linalg.eigvals(true_covariance @ false_covariance).real.clamp(min=0).sqrt()
        spread = true_covariance.trace() + false_covariance.trace() - 2 * roots.sum()
        distance: Tensor = (true_mean - false_mean).square().sum() + spread
        return distance

    def _moments(self, name: str) -> tuple[Tensor, Tensor]:
        """Return mean and covariance of a set."""
        count = getattr(self, f"{name}_count")
        mean = getattr(self, f"{name}_sum") / count
        return mean, getattr(self, f"{name}_products") / count - torch.outer(mean, mean)


class _WithNoise(Dataset[Any]):
    def __init__(self, images: TensorDataset) -> None:
        self._images = images

    def __len__(self) -> int:
        return len(self._images)

    def get_sample(self, index: int, seed: int) -> tuple[Tensor, Tensor, Tensor]:
        """Return the image, its digit, and noise of shape (16,)."""
        image, digit = self._images[index]
        generator = torch.Generator().manual_seed(seed)
        return image, digit, torch.randn(NUM_LATENT, generator=generator)


def _one_hot(digits: Tensor, like: Tensor) -> Tensor:
    return functional.one_hot(digits, NUM_CLASSES).to(like.dtype)  # (batch, 10)
