"""Small models in which gradients arrive in unusual ways, for several tests."""

from __future__ import annotations

from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint


class Checkpointed(nn.Module):
    """A block whose activations are computed again in backward, several times if `repeats` is more than one."""

    def __init__(self, outputs: int, *, reentrant: bool, repeats: int = 1) -> None:
        super().__init__()
        self.stem = nn.Linear(8, 8)
        self.block = nn.Sequential(nn.Linear(8, 8), nn.Tanh())
        self.head = nn.Linear(8, outputs)
        self.reentrant, self.repeats = reentrant, repeats

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for _ in range(self.repeats):
            x = checkpoint(self.block, x, use_reentrant=self.reentrant)
        return self.head(x)


class SparseEmbedding(nn.Module):
    """A table with sparse gradients, of which each sample uses a few rows."""

    def __init__(self, outputs: int) -> None:
        super().__init__()
        self.table = nn.EmbeddingBag(50, 6, mode="sum", sparse=True)
        self.head = nn.Linear(6, outputs)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.table((x.abs() * 40).long() % 50))
