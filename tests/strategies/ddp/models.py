"""Small models in which gradients arrive in every way that a Reducer must cope with."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint


class Mlp(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 4))


class ConvBatchNorm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(1, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 4, 3), nn.BatchNorm2d(4)
        ).to(memory_format=torch.channels_last)
        self.head = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        images = x.repeat(1, 8).view(-1, 1, 8, 8)
        return self.head(self.body(images).mean((2, 3)))


class TiedGpt(nn.Module):
    """Token embedding shared with the output layer, one attention block."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(11, 16)
        self.block = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True, norm_first=True)
        self.head = nn.Linear(16, 11, bias=False)
        self.head.weight = self.tokens.weight

    def forward(self, x: Tensor) -> Tensor:
        ids = (x.abs() * 10).long() % 11  # (batch, 8)
        return self.head(self.block(self.tokens(ids))).mean(1)


class SparseEmbedding(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.EmbeddingBag(50, 6, mode="sum", sparse=True)
        self.head = nn.Linear(6, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.table((x.abs() * 40).long() % 50))


class Branches(nn.Module):
    """Which branch is used depends on the first element of the input; one is never used."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(8, 8)
        self.branches = nn.ModuleList(nn.Linear(8, 4) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        return self.branches[int(x[0, 0].abs() * 10) % 3](torch.relu(self.stem(x)))


class Checkpointed(nn.Module):
    """The same block twice, recomputed in backward."""

    def __init__(self, *, reentrant: bool, repeats: int = 1) -> None:
        super().__init__()
        self.stem = nn.Linear(8, 8)
        self.block = nn.Sequential(nn.Linear(8, 8), nn.Tanh())
        self.head = nn.Linear(8, 4)
        self.reentrant, self.repeats = reentrant, repeats

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for _ in range(self.repeats):
            x = checkpoint(self.block, x, use_reentrant=self.reentrant)
        return self.head(x)


class TwoTypes(nn.Module):
    """float32 and float64 parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, 8)
        self.second = nn.Linear(8, 4).double()

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x).double()).float()


@dataclass(frozen=True)
class Case:
    """A model, and how both implementations wrap it."""

    make: Callable[[], nn.Module]
    arguments: dict[str, Any]
    autocast: bool = False
    micro_batches: int = 1


CASES: dict[str, Case] = {
    "mlp": Case(Mlp, {}),
    "mlp, views": Case(Mlp, {"gradient_as_bucket_view": True}),
    "conv": Case(ConvBatchNorm, {}),
    "gpt": Case(TiedGpt, {}),
    "gpt, views, static": Case(TiedGpt, {"gradient_as_bucket_view": True, "static_graph": True}),
    "sparse": Case(SparseEmbedding, {}),
    "unused": Case(Branches, {"find_unused_parameters": True}),
    "unused, views": Case(Branches, {"find_unused_parameters": True, "gradient_as_bucket_view": True}),
    "unused, no_sync": Case(Branches, {"find_unused_parameters": True}, micro_batches=3),
    "checkpoint": Case(lambda: Checkpointed(reentrant=False), {}),
    "checkpoint, reentrant": Case(lambda: Checkpointed(reentrant=True), {}),
    "checkpoint twice, static": Case(lambda: Checkpointed(reentrant=True, repeats=3), {"static_graph": True}),
    "two types": Case(TwoTypes, {}),
    "no_sync": Case(Mlp, {"gradient_as_bucket_view": True}, micro_batches=3),
    "no_sync, copies": Case(Mlp, {}, micro_batches=3),
    "sparse, no_sync": Case(SparseEmbedding, {}, micro_batches=2),
    "mixed precision": Case(Mlp, {}, autocast=True),
}


def train(wrapped: nn.Module, *, case: Case, rank: int, steps: int, seed: int = 0) -> None:
    """Train with momentum; every rank draws its own batches."""
    optimizer = torch.optim.SGD(
        wrapped.parameters(), lr=0.05, momentum=0.0 if isinstance(wrapped.module, SparseEmbedding) else 0.9
    )
    generator = torch.Generator().manual_seed(100 * seed + rank)
    for _ in range(steps):
        optimizer.zero_grad()
        for micro_batch in range(case.micro_batches):
            x = torch.randn(4, 8, generator=generator)
            if micro_batch < case.micro_batches - 1:
                with wrapped.no_sync():
                    backward(wrapped, x, case)
            else:
                backward(wrapped, x, case)
        optimizer.step()


def backward(wrapped: nn.Module, x: Tensor, case: Case) -> None:
    with torch.autocast("cpu", torch.bfloat16, enabled=case.autocast):
        loss = wrapped(x).float().square().mean()
    loss.backward()
