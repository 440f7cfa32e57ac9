"""Tasks on which strategies are compared: a perceptron, a network with batch norm, a small GPT with token weights."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import TensorDataset

from trainkit import Callback, Data, TaskModule

VOCABULARY = 17
CONTEXT = 6


class _Seeded(TaskModule):
    """The same initial weights in every process."""

    def __init__(self, *, lr: float = 0.1) -> None:
        super().__init__()
        self.lr = lr
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(3)
            self.build()

    def build(self) -> None:
        raise NotImplementedError

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=self.lr, momentum=0.9)


class Perceptron(_Seeded):
    """Regression of one number from eight."""

    def build(self) -> None:
        self.network = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 1))

    def training_step(self, batch: Any) -> Any:
        inputs, targets = batch
        loss = functional.mse_loss(self.network(inputs), targets)
        return {"loss": loss, "absolute": loss.detach().sqrt()}

    def validation_step(self, batch: Any) -> Any:
        error = self.network(batch[0]) - batch[1]
        return {"loss": error.square().mean(), "absolute": error.abs().mean()}

    def predict_step(self, batch: Any) -> Any:
        return self.network(batch[0])


class ConvNet(_Seeded):
    """Images in two classes; its batch norm looks at all images of a micro-batch."""

    norm: type[nn.Module] = nn.BatchNorm2d

    def build(self) -> None:
        self.network = nn.Sequential(
            nn.Conv2d(1, 4, 3, bias=False), self.norm(4), nn.ReLU(), nn.Flatten(), nn.Linear(4 * 16, 2)
        )

    def training_step(self, batch: Any) -> Any:
        images, classes = batch
        return functional.cross_entropy(self.network(images), classes)

    validation_step = training_step


class PlainConvNet(ConvNet):
    """The same without anything that looks at several images."""

    norm = nn.Identity


class GPT(_Seeded):
    """Predicts the next token; padding does not count, so that micro-batches weigh their number of tokens.

    Embedding and output share their weight.
    """

    def __init__(self, *, lr: float = 0.03) -> None:
        super().__init__(lr=lr)

    def build(self) -> None:
        width = 8
        self.tokens = nn.Embedding(VOCABULARY, width)
        self.positions = nn.Parameter(0.1 * torch.randn(CONTEXT, width))
        self.block = nn.TransformerEncoderLayer(width, 2, 16, dropout=0.0, batch_first=True, norm_first=True)
        self.head = nn.Linear(width, VOCABULARY, bias=False)
        self.head.weight = self.tokens.weight
        self.register_buffer("mask", torch.full((CONTEXT, CONTEXT), float("-inf")).triu(1), persistent=False)

    def training_step(self, batch: Any) -> Any:
        (tokens,) = batch  # (samples, CONTEXT + 1), 0 is padding
        inputs, targets = tokens[:, :-1], tokens[:, 1:]
        hidden = self.block(self.tokens(inputs) + self.positions, src_mask=self.mask)
        logits = self.head(hidden)
        loss = functional.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=0)
        return {"loss": loss, "weight": (targets != 0).sum()}

    validation_step = training_step


def numbers(num_samples: int, *, dtype: torch.dtype = torch.float32) -> TensorDataset:
    """Samples for Perceptron."""
    inputs = torch.randn(num_samples, 8, generator=torch.Generator().manual_seed(5), dtype=dtype)
    return TensorDataset(inputs, inputs.sum(1, keepdim=True).sin())


def images(num_samples: int, *, dtype: torch.dtype = torch.float32) -> TensorDataset:
    """Samples for ConvNet."""
    pixels = torch.randn(num_samples, 1, 6, 6, generator=torch.Generator().manual_seed(6), dtype=dtype)
    return TensorDataset(pixels, (pixels.mean((1, 2, 3)) > 0).long())


def sentences(num_samples: int, *, dtype: torch.dtype = torch.float32) -> TensorDataset:
    """Samples for GPT, of unequal length."""
    generator = torch.Generator().manual_seed(7)
    tokens = torch.randint(1, VOCABULARY, (num_samples, CONTEXT + 1), generator=generator)
    lengths = 2 + torch.randint(0, CONTEXT, (num_samples, 1), generator=generator)
    return TensorDataset(tokens * (torch.arange(CONTEXT + 1) < lengths))


TASKS: dict[str, tuple[type[_Seeded], Any]] = {
    "perceptron": (Perceptron, numbers),
    "plain_conv_net": (PlainConvNet, images),
    "conv_net": (ConvNet, images),
    "gpt": (GPT, sentences),
}


def make(name: str, num_samples: int, *, batch_size: int = 8, dtype: torch.dtype = torch.float32) -> tuple[Any, Data]:
    """Return a new task and its data."""
    task, dataset = TASKS[name]
    return task(), Data(train=dataset(num_samples, dtype=dtype), batch_size=batch_size)


class StepWeights(Callback):
    """Keeps the parameters and buffers after every step."""

    def __init__(self) -> None:
        self.steps: list[dict[str, Tensor]] = []

    def on_step_end(self, run: Any) -> None:
        self.steps.append({name: tensor.detach().cpu().clone() for name, tensor in run.task.state_dict().items()})


def largest_difference(left: list[dict[str, Tensor]], right: list[dict[str, Tensor]], *, names: Any = None) -> float:
    """Return the largest difference after any step, relative to the largest number of its tensor.

    Tensors that are nearly zero, as biases are at the start, count by a hundredth of the task's largest number.
    """
    assert len(left) == len(right) and left
    largest = 0.0
    for ours, theirs in zip(left, right, strict=True):
        sizes = {name: theirs[name].abs().max().item() for name in names or ours}
        floor = 0.01 * max(sizes.values())
        for name, size in sizes.items():
            difference = (ours[name].double() - theirs[name].double()).abs().max().item()
            assert math.isfinite(difference), name
            largest = max(largest, difference / max(size, floor))
    return largest
