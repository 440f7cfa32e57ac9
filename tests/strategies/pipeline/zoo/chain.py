"""Chain: a task of linear layers with pieces between them, which most tasks of the zoo are made of."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from trainkit.task import TaskModule

WIDTH = 6


class Piece(nn.Module):
    """Something between two layers, from a tensor of shape (samples, WIDTH) to another one."""

    observed: tuple[str, ...] = ()
    """Names of attributes that must be those of one process after training."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)

    def run(self, x: Tensor) -> Tensor:
        """Return the result; called by the step itself, so that its calls are nodes."""
        raise NotImplementedError

    def forward(self, x: Tensor) -> Tensor:
        return self.run(x)


class Called(Piece):
    """A function of this piece, which has a linear layer, and of the tensor."""

    def __init__(self, function: Callable[["Called", Tensor], Tensor]) -> None:
        super().__init__()
        self.function = function

    def run(self, x: Tensor) -> Tensor:
        return self.function(self, x)


class Wrapped(Piece):
    """A module of torch, called with the tensor."""

    def __init__(self, build: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.module = build()
        del self.layer

    def run(self, x: Tensor) -> Tensor:
        return self.module(x)


class Zoo(TaskModule):
    """A task of the zoo: its batches, its optimizer, and the attributes that are compared."""

    observed: tuple[str, ...] = ()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        trained = [p for p in self.parameters() if p.requires_grad]
        return torch.optim.SGD(trained, lr=0.1, momentum=0.5)

    def observations(self) -> dict[str, Any]:
        """Return the observed attributes of the task and of its modules by name."""
        return {
            f"{name}.{key}": getattr(module, key)
            for name, module in self.named_modules()
            for key in getattr(module, "observed", ())
        }

    @staticmethod
    def batch(size: int, generator: torch.Generator) -> Any:
        return torch.randn(size, WIDTH, generator=generator), torch.randn(size, WIDTH, generator=generator)


class Chain(Zoo):
    """Each piece follows a linear layer; `None` stands for no piece. With `inside` a piece is called as a module."""

    def __init__(self, *builds: Callable[[], Piece] | None, inside: bool = False) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(WIDTH, WIDTH) for _ in range(len(builds) + 1)])
        self.pieces = nn.ModuleList([nn.Identity() if build is None else build() for build in builds])
        self.inside = inside

    def training_step(self, batch: Any) -> Tensor:
        x = batch[0]
        for layer, piece in zip(self.layers, self.pieces, strict=False):
            x = layer(x).tanh()
            if isinstance(piece, Piece):
                x = piece(x) if self.inside else piece.run(x)
        return (self.layers[-1](x) - batch[1]).square().mean()


def chain(build: Callable[[], Piece], *, inside: bool = False) -> Callable[[], Chain]:
    """Return the constructor of a task with two such pieces."""
    return partial(Chain, None, build, None, build, None, inside=inside)
