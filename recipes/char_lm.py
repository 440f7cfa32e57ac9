"""A small GPT that learns to write Python, from the source files that every Python brings with it.

It reads bytes, so there is no tokenizer, and nothing is downloaded.
"""

from __future__ import annotations

import math
import sysconfig
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.optim import AdamW
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import TensorDataset

from trainkit.data.data import Data
from trainkit.errors import UserError
from trainkit.task import TaskModule

NUM_TOKENS = 256
_PADDING = -1
_INITIAL_STD = 0.02
_WARMUP = 0.1  # of all steps
# One file in so many is for validation.
_VALIDATION_SHARE = 10


class CharLM(TaskModule):
    """Predicts the next byte of a text from those before it.

    Nothing in it is random in training. Every step says how many bytes it predicted, so that a window at the end of
    a file, which is shorter than the others, counts for as much as it holds.

    Args:
        context: Bytes that are looked at, at most.
        width: Features of each position.
        layers: Blocks of attention and a two-layer network.
        heads: Parts that attention is divided into; `width` must divide by it.
        lr: Highest learning rate, reached after a tenth of the steps.
        weight_decay: Of AdamW, for matrices only.

    """

    def __init__(
        self,
        *,
        context: int = 128,
        width: int = 128,
        layers: int = 4,
        heads: int = 4,
        lr: float = 3e-3,
        weight_decay: float = 0.1,
    ) -> None:
        super().__init__()
        if heads < 1 or width < heads or width % heads:
            raise UserError(f"task.width={width} must divide by task.heads={heads}; set task.heads=1 or another one.")
        if layers < 1 or context < 1:
            raise UserError(f"task.layers and task.context must be at least 1, got {layers} and {context}.")
        self.lr = lr
        self.weight_decay = weight_decay
        self.tokens = nn.Embedding(NUM_TOKENS, width)
        self.positions = nn.Embedding(context, width)
        self.blocks = nn.ModuleList(_Block(width, heads) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        for name, parameter in self.named_parameters():
            if parameter.dim() == 2:
                # What is added to the residual stream keeps its size whatever the depth.
                depth = 2 * layers if name.endswith(("mix.weight", "shrink.weight")) else 1
                nn.init.normal_(parameter, std=_INITIAL_STD / math.sqrt(depth))

    def forward(self, tokens: Tensor) -> Tensor:
        """Return the logits of the next byte at each position of `tokens`, shape (batch, length)."""
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        features = self.tokens(tokens) + self.positions(positions)  # (batch, length, width)
        for block in self.blocks:
            features = block(features)
        # The matrix that reads bytes also writes them.
        return functional.linear(self.norm(features), self.tokens.weight)  # (batch, length, 256)

    def training_step(self, batch: Any) -> dict[str, Tensor]:
        """Return the mean loss of a byte in nats, in bits, and the number of bytes."""
        return self._measure(batch[0])

    def validation_step(self, batch: Any) -> dict[str, Tensor]:
        """Return the mean loss of a byte in nats, in bits, and the number of bytes."""
        return self._measure(batch[0])

    def predict_step(self, batch: Any) -> Tensor:
        """Return the most likely next byte at each position, shape (batch, context)."""
        tokens: Tensor = self(_inputs(batch[0])).argmax(dim=2)
        return tokens

    def configure_optimizers(self, total_steps: int) -> tuple[AdamW, LambdaLR]:
        """Return AdamW with a learning rate that rises, and then falls along a half cosine."""
        matrices = [parameter for parameter in self.parameters() if parameter.dim() >= 2]
        others = [parameter for parameter in self.parameters() if parameter.dim() < 2]
        groups = [
            {"params": matrices, "weight_decay": self.weight_decay},
            {"params": others, "weight_decay": 0.0},
        ]
        optimizer = AdamW(groups, lr=self.lr, betas=(0.9, 0.95))
        return optimizer, LambdaLR(optimizer, partial(_share_of_rate, total_steps=total_steps))

    def _measure(self, windows: Tensor) -> dict[str, Tensor]:
        targets = windows[:, 1:].long()  # (batch, context)
        loss = functional.cross_entropy(self(_inputs(windows)).flatten(0, 1), targets.flatten(), ignore_index=_PADDING)
        return {
            "loss": loss,
            "bits_per_character": loss.detach() / math.log(2),
            "weight": (targets != _PADDING).sum(),
        }


class SourceFiles(Data):
    """Windows of the standard library's own source files; every tenth file validates.

    Args:
        batch_size: Windows of one optimizer step, over all ranks.
        evaluation_batch_size: Windows of one evaluation batch, over all ranks.
        context: Bytes that are looked at to predict the next one.
        max_bytes: Bytes of all files together, at most.
        num_workers: Processes that read; 0: the training process.

    """

    def __init__(
        self,
        *,
        batch_size: int = 32,
        evaluation_batch_size: int = 64,
        context: int = 128,
        max_bytes: int = 2_000_000,
        num_workers: int = 0,
    ) -> None:
        super().__init__(batch_size=batch_size, evaluation_batch_size=evaluation_batch_size, num_workers=num_workers)
        if context < 1 or max_bytes < 1:
            raise UserError(f"data.context and data.max_bytes must be at least 1, got {context} and {max_bytes}.")
        self.context = context
        self.max_bytes = max_bytes

    def dataset(self, stage: str) -> TensorDataset:
        """Return the windows of a stage; tests and predictions are made with the validation files."""
        train, validation = self._windows
        return TensorDataset(train if stage == "train" else validation)

    @cached_property
    def _windows(self) -> tuple[Tensor, Tensor]:
        """Return the windows to train on and to validate with, each of shape (windows, context + 1)."""
        texts = source_texts(max_bytes=self.max_bytes)
        return (
            self._cut([text for index, text in enumerate(texts) if index % _VALIDATION_SHARE]),
            self._cut(texts[::_VALIDATION_SHARE]),
        )

    def _cut(self, texts: list[bytes]) -> Tensor:
        """Cut each text by itself; neighbours share one byte, which one predicts and the other starts with."""
        rows = []
        for text in texts:
            tokens = torch.frombuffer(bytearray(text), dtype=torch.uint8).to(torch.int16)
            num_windows = -(-(len(text) - 1) // self.context)
            padded = functional.pad(tokens, (0, num_windows * self.context + 1 - len(text)), value=_PADDING)
            rows.append(padded.unfold(0, self.context + 1, self.context))
        return torch.cat(rows) if rows else torch.empty(0, self.context + 1, dtype=torch.int16)


def source_texts(*, max_bytes: int) -> list[bytes]:
    """Return the standard library's top-level source files in the order of their names, the last one cut short."""
    folder = Path(sysconfig.get_path("stdlib"))
    texts, left = [], max_bytes
    for path in sorted(folder.glob("*.py")):
        text = path.read_bytes()[:left]
        if len(text) >= 2:  # one byte to start from and one to predict
            texts.append(text)
        left -= len(text)
        if left <= 0:
            break
    if len(texts) < 2:
        raise UserError(
            f"there are {len(texts)} source files for {max_bytes} bytes in {folder}, and at least 2 are needed: one to "
            "train on and one to validate with. Set data.max_bytes=100000 or more, or use a Python that brings its "
            "sources."
        )
    return texts


def _share_of_rate(step: int, *, total_steps: int) -> float:
    """Return the share of the highest learning rate: rising over a tenth of the steps, then falling to zero."""
    warmup = max(1, round(_WARMUP * total_steps))
    if step < warmup:
        return (step + 1) / warmup
    return 0.5 + 0.5 * math.cos(math.pi * (step - warmup) / max(1, total_steps - warmup))


def _inputs(windows: Tensor) -> Tensor:
    # Padding has no meaning, but an embedding needs a row; nothing before it looks at it.
    return windows[:, :-1].long().clamp(min=0)


class _Block(nn.Module):
    """Attention to earlier positions, then a network at each position; both add to what came in."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.attention_norm = nn.LayerNorm(width)
        self.attend = nn.Linear(width, 3 * width, bias=False)
        self.mix = nn.Linear(width, width, bias=False)
        self.network_norm = nn.LayerNorm(width)
        self.widen = nn.Linear(width, 4 * width, bias=False)
        self.shrink = nn.Linear(4 * width, width, bias=False)

    def forward(self, features: Tensor) -> Tensor:
        """Return features of the same shape, (batch, length, width)."""
        features = features + self.mix(self._attended(self.attention_norm(features)))
        network: Tensor = self.shrink(functional.gelu(self.widen(self.network_norm(features))))
        return features + network

    def _attended(self, features: Tensor) -> Tensor:
        parts = self.attend(features).unflatten(2, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        query, key, value = parts  # each of shape (batch, heads, length, width / heads)
        attended = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        return attended.transpose(1, 2).flatten(2)
