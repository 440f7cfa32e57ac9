"""Conditional GAN on handwritten digits: discriminator and generator train in two phases of each step.

Needs the extra `recipes`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.optim import Adam
from torch.utils.data import TensorDataset
from trainkit.recipes.digits import NUM_CLASSES, DigitsData

from trainkit.errors import UserError
from trainkit.metrics.metric import Metric
from trainkit.optim.phase import Phase
from trainkit.task import TaskModule

NUM_PIXELS = 64
NUM_LATENT = 16


class DigitsGAN(TaskModule):
    """Generates images of shape (1, 8, 8) of a given digit (Goodfellow et al., 2014; Mirza, 2014).

    Each step first trains the discriminator to distinguish real images from generated ones, then the generator to
    fool it. The noise belongs to the sample, so that every strategy sees the same.

    Args:
        width: Hidden units of both networks.
        lr: Learning rate of Adam in both phases.
        penalty: Weight of the gradient penalty at real images, against overfitting of the discriminator (Mescheder et
            al., 2018).
        generator_every: Steps between two of the generator.

    """

    def __init__(self, *, width: int = 128, lr: float = 1e-3, penalty: float = 10.0, generator_every: int = 1) -> None:
        super().__init__()
        if width < 1:
            raise UserError(f"task.width must be at least 1 unit, got {width}.")
        self.lr, self.penalty, self.generator_every = lr, penalty, generator_every
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
        """Return images of shape (batch, 1, 8, 8), from noise of shape (batch, 16) and digits of shape (batch,)."""
        pixels: Tensor = self.generator(torch.cat([noise, _one_hot(digits, noise)], dim=1))  # (batch, 64)
        return pixels.view(-1, 1, 8, 8)

    def discriminator_step(self, batch: Any) -> dict[str, Tensor]:
        """Return the loss and the accuracy of the discriminator."""
        images, digits, noise = batch
        # The generator does not train in this phase, and its graph would cost memory.
        with torch.no_grad():
            generated = self(noise, digits)
        # The penalty needs the gradient at the images, which belong to the batch and so are not changed themselves.
        images = images.detach().requires_grad_()
        real, fake = self._discriminate(images, digits), self._discriminate(generated, digits)
        loss = functional.softplus(-real).mean() + functional.softplus(fake).mean()
        (gradient,) = torch.autograd.grad(real.sum(), images, create_graph=True)  # (batch, 1, 8, 8)
        loss = loss + self.penalty / 2 * gradient.square().sum(dim=(1, 2, 3)).mean()
        return {"loss": loss, "accuracy": torch.cat([real > 0, fake < 0]).float().mean()}

    def generator_step(self, batch: Any) -> Tensor:
        """Return the loss of the generator."""
        _, digits, noise = batch
        return functional.softplus(-self._discriminate(self(noise, digits), digits)).mean()

    def validation_step(self, batch: Any) -> dict[str, Any]:
        """Return the Fréchet distance of generated and real images, over the full evaluation."""
        images, digits, noise = batch
        self.distance.update(images.flatten(1), self(noise, digits).flatten(1))
        return {"distance": self.distance}

    def predict_step(self, batch: Any) -> Tensor:
        """Return a generated image of each sample's digit, shape (batch, 1, 8, 8)."""
        _, digits, noise = batch
        images: Tensor = self(noise, digits)
        return images

    def configure_phases(self) -> list[Phase]:
        """Return the two phases of a step."""
        betas = (0.5, 0.999)  # less momentum, as the opponent changes (Radford et al., 2015)
        return [
            Phase("discriminator", Adam(self.discriminator.parameters(), lr=self.lr, betas=betas)),
            Phase("generator", Adam(self.generator.parameters(), lr=self.lr, betas=betas), every=self.generator_every),
        ]

    def _discriminate(self, images: Tensor, digits: Tensor) -> Tensor:
        """Return the logits of images being real, shape (batch,)."""
        pixels = images.flatten(1)
        logits: Tensor = self.discriminator(torch.cat([pixels, _one_hot(digits, pixels)], dim=1))
        return logits.squeeze(1)


class DigitsWithNoise(DigitsData):
    """The images of `digits`, each with its digit and noise, which depends on the seed, the epoch and the sample."""

    def dataset(self, stage: str) -> Any:
        """Return the images of a stage with their noise."""
        return _WithNoise(*super().dataset(stage).tensors)


class FrechetDistance(Metric):
    """Fréchet distance between normal distributions fitted to two sets of points; 0 if they are equal (Fréchet, 1957).

    Args:
        size: Dimensions of a point.

    """

    def __init__(self, size: int) -> None:
        super().__init__()
        for name in ("real", "fake"):
            self.add_state(f"{name}_count", torch.zeros((), dtype=torch.float64))
            self.add_state(f"{name}_sum", torch.zeros(size, dtype=torch.float64))
            self.add_state(f"{name}_products", torch.zeros(size, size, dtype=torch.float64))

    def update(self, real: Tensor, fake: Tensor) -> None:
        """Add points of both sets, each of shape (batch, size)."""
        for name, points in (("real", real.double()), ("fake", fake.double())):
            setattr(self, f"{name}_count", getattr(self, f"{name}_count") + len(points))
            setattr(self, f"{name}_sum", getattr(self, f"{name}_sum") + points.sum(dim=0))
            setattr(self, f"{name}_products", getattr(self, f"{name}_products") + points.T @ points)

    def compute(self) -> Tensor:
        """Return the squared distance of the means plus the distance of the covariances."""
        real_mean, real_covariance = self._moments("real")
        fake_mean, fake_covariance = self._moments("fake")
        # The trace of a matrix square root is the sum of the square roots of the eigenvalues.
        roots = torch.linalg.eigvals(real_covariance @ fake_covariance).real.clamp(min=0).sqrt()
        spread = real_covariance.trace() + fake_covariance.trace() - 2 * roots.sum()
        distance: Tensor = (real_mean - fake_mean).square().sum() + spread
        return distance

    def _moments(self, name: str) -> tuple[Tensor, Tensor]:
        """Return the mean and the covariance of a set."""
        count = getattr(self, f"{name}_count")
        mean = getattr(self, f"{name}_sum") / count
        return mean, getattr(self, f"{name}_products") / count - torch.outer(mean, mean)


class _WithNoise(TensorDataset):
    def get_sample(self, index: int, seed: int) -> tuple[Tensor, Tensor, Tensor]:
        """Return the image, its digit, and noise of shape (16,)."""
        image, digit = self[index]
        generator = torch.Generator().manual_seed(seed)
        return image, digit, torch.randn(NUM_LATENT, generator=generator)


def _one_hot(digits: Tensor, like: Tensor) -> Tensor:
    return functional.one_hot(digits, NUM_CLASSES).to(like.dtype)  # (batch, 10)
