"""Small GPT that learns to write Python, from the source files of the standard library.

It reads bytes, without a tokenizer. Nothing is downloaded.
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
from trainkit.recipes.gpt import Block, init_weights, make_adamw

from trainkit.data.data import Data
from trainkit.errors import UserError
from trainkit.task import TaskModule

NUM_TOKENS = 256
_PADDING = -1
_WARMUP = 0.1  # of all steps
_VALIDATION_EVERY = 10  # files, of which one validates


class CharLM(TaskModule):
    """Predicts the next byte of a text from the bytes before it.

    Training is deterministic: there is no dropout. Every step returns the number of predicted bytes as its `weight`, so
    that the shorter window at the end of a file counts for what it holds.

    Args:
        context: Maximum number of input bytes.
        width: Features of each position.
        layers: Number of transformer blocks.
        heads: Attention heads; `width` must be divisible by it.
        lr: Peak learning rate, reached after a tenth of the steps.
        weight_decay: Weight decay of AdamW, for matrices only.

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
            raise UserError(
                f"task.width={width} must be divisible by task.heads={heads}; set task.heads=1, for example."
            )
        if layers < 1 or context < 1:
            raise UserError(f"task.layers and task.context must be at least 1, got {layers} and {context}.")
        self.lr, self.weight_decay = lr, weight_decay
        self.tokens = nn.Embedding(NUM_TOKENS, width)
        self.positions = nn.Embedding(context, width)
        self.blocks = nn.ModuleList(Block(width, heads, bias=False, gelu="none") for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        init_weights(self, layers=layers)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return the logits of the next byte at each position of `tokens`, shape (batch, length)."""
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        features = self.tokens(tokens) + self.positions(positions)  # (batch, length, width)
        for block in self.blocks:
            features = block(features)
        # The weights of the input embedding and the output layer are tied.
        return functional.linear(self.norm(features), self.tokens.weight)  # (batch, length, 256)

    def training_step(self, batch: Any) -> dict[str, Tensor]:
        """Return the mean loss of a byte in nats, in bits, and the number of bytes."""
        logits, targets = self(_inputs(batch[0])), batch[0][:, 1:].long()  # (batch, context, 256), (batch, context)
        loss = functional.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=_PADDING)
        return {"loss": loss, "bits_per_character": loss.detach() / math.log(2), "weight": (targets != _PADDING).sum()}

    validation_step = training_step

    def predict_step(self, batch: Any) -> Tensor:
        """Return the most likely next byte at each position, shape (batch, context)."""
        return torch.argmax(self(_inputs(batch[0])), dim=2)

    def configure_optimizers(self, total_steps: int) -> tuple[AdamW, LambdaLR]:
        """Return AdamW with a learning rate that warms up, then decays along a half cosine."""
        optimizer = make_adamw(self, lr=self.lr, weight_decay=self.weight_decay)
        return optimizer, LambdaLR(optimizer, partial(_lr_factor, total_steps=total_steps))


class SourceFiles(Data):
    """Windows of the standard library's source files; every tenth file validates.

    Args:
        batch_size: Windows of one optimizer step, over all ranks.
        evaluation_batch_size: Windows of one evaluation batch, over all ranks.
        context: Input bytes of a window.
        max_bytes: Maximum size of all files together.
        num_workers: Worker processes that read samples; 0: the training process.

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
        self.context, self.max_bytes = context, max_bytes

    def dataset(self, stage: str) -> TensorDataset:
        """Return the windows of a stage; test and predict use the validation files."""
        train, validation = self._windows
        return TensorDataset(train if stage == "train" else validation)

    @cached_property
    def _windows(self) -> tuple[Tensor, Tensor]:
        """Return the training and validation windows, each of shape (windows, context + 1)."""
        texts = source_texts(max_bytes=self.max_bytes)
        train = [text for index, text in enumerate(texts) if index % _VALIDATION_EVERY]
        return self._split(train), self._split(texts[::_VALIDATION_EVERY])

    def _split(self, texts: list[bytes]) -> Tensor:
        """Split each text into windows; the last byte of a window is the first of the next one."""
        rows = []
        for text in texts:
            tokens = torch.frombuffer(bytearray(text), dtype=torch.uint8).to(torch.int16)
            num_windows = -(-(len(text) - 1) // self.context)
            padded = functional.pad(tokens, (0, num_windows * self.context + 1 - len(text)), value=_PADDING)
            rows.append(padded.unfold(0, self.context + 1, self.context))
        return torch.cat(rows) if rows else torch.empty(0, self.context + 1, dtype=torch.int16)


def source_texts(*, max_bytes: int) -> list[bytes]:
    """Return the standard library's top-level source files by name, up to `max_bytes`; the last one is truncated."""
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
            "train on and one to validate with. Set data.max_bytes=100000 or more, or use a Python installation that "
            "includes its sources."
        )
    return texts


def _lr_factor(step: int, *, total_steps: int) -> float:
    """Return the factor of the peak learning rate: linear warm-up over a tenth of the steps, then cosine to zero."""
    warmup = max(1, round(_WARMUP * total_steps))
    if step < warmup:
        return (step + 1) / warmup
    return 0.5 + 0.5 * math.cos(math.pi * (step - warmup) / max(1, total_steps - warmup))


def _inputs(windows: Tensor) -> Tensor:
    # The embedding needs a valid index for padding; attention is causal, so no byte before it is affected.
    return windows[:, :-1].long().clamp(min=0)
