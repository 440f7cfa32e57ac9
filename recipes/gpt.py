"""GPT-2 in its four sizes and two smaller ones, on memory-mapped token files.

Any folder of text is tokenized, into bytes or by BPE. The default text is the source files of the standard library, so
nothing is downloaded.

Needs the extra `huggingface` for `data.tokenizer=bpe`.
"""

from __future__ import annotations

import hashlib
import json
import math
import sysconfig
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.optim import AdamW
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.checkpoint import checkpoint
from torch.utils.data import Dataset

from trainkit.data.data import Data
from trainkit.data.prepare import prepare_folder
from trainkit.errors import UserError, nearest
from trainkit.storage import local_path
from trainkit.task import TaskModule

_NUM_BYTES = 256
_INITIAL_STD = 0.02
_WARMUP = 0.05  # of all steps
_FINAL_LR = 0.1  # of the peak
_VALIDATION_FRACTION = 0.1  # of each file, at its end
_MIN_BYTES = 32  # of a file
_END = "<|end|>"
_NAME_LENGTH = 12  # of the name of a token folder
SIZES = {  # name: layers, attention heads, features of each position
    "tiny": (2, 2, 32),
    "mini": (4, 4, 128),
    "gpt2": (12, 12, 768),
    "gpt2-medium": (24, 16, 1024),
    "gpt2-large": (36, 20, 1280),
    "gpt2-xl": (48, 25, 1600),
}
Encode = Callable[[bytes], Any]
"""Returns the tokens of a text, with an end token."""


class GPT(TaskModule):
    """Predicts the next token of a text from the tokens before it.

    Training is deterministic: there is no dropout. The weights of the input embedding and the output layer are tied.

    Args:
        size: `tiny`, `mini`, `gpt2` (124 million parameters), `gpt2-medium`, `gpt2-large` or `gpt2-xl` (1558 million).
        context: Maximum number of input tokens; 1024 in the original.
        vocabulary: Vocabulary size, that of the data; 257 for bytes, 50257 in the original.
        lr: Peak learning rate, reached after a twentieth of the steps; it decays to a tenth.
        weight_decay: Weight decay of AdamW, for matrices only.
        recompute: Recompute each block in backward: a third more time, much less memory.

    """

    def __init__(
        self,
        *,
        size: str = "mini",
        context: int = 128,
        vocabulary: int = 257,
        lr: float = 1e-3,
        weight_decay: float = 0.1,
        recompute: bool = False,
    ) -> None:
        super().__init__()
        if size not in SIZES:
            raise UserError(f"unknown task.size={size!r}.{nearest(size, SIZES)} There are: {', '.join(SIZES)}.")
        if context < 1 or vocabulary < 2:
            raise UserError(
                f"task.context must be at least 1 and task.vocabulary at least 2, got {context}, {vocabulary}."
            )
        layers, heads, width = SIZES[size]
        self.lr, self.weight_decay, self.recompute = lr, weight_decay, recompute
        self.tokens = nn.Embedding(vocabulary, width)
        self.positions = nn.Embedding(context, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        init_weights(self, layers=layers)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return the logits of the next token at each position of `tokens`, shape (batch, length)."""
        features = self.tokens(tokens) + self.positions(torch.arange(tokens.shape[1], device=tokens.device))
        for block in self.blocks:  # (batch, length, width)
            if self.recompute and self.training:
                features = checkpoint(block, features, use_reentrant=False)
            else:
                features = block(features)
        return functional.linear(self.norm(features), self.tokens.weight)  # (batch, length, vocabulary)

    def training_step(self, batch: Any) -> dict[str, Tensor]:
        """Return the mean loss of a token and the accuracy of the most likely one."""
        logits, targets = self(batch[:, :-1]), batch[:, 1:]  # (batch, context, vocabulary), (batch, context)
        return {
            "loss": functional.cross_entropy(logits.flatten(0, 1), targets.flatten()),
            "accuracy": (logits.argmax(dim=2) == targets).float().mean(),
        }

    validation_step = training_step

    def predict_step(self, batch: Any) -> Tensor:
        """Return the most likely next token at each position, shape (batch, context)."""
        return torch.argmax(self(batch[:, :-1]), dim=2)

    def configure_optimizers(self, total_steps: int) -> tuple[AdamW, LambdaLR]:
        """Return AdamW with a learning rate that warms up, then decays along a half cosine."""
        optimizer = make_adamw(self, lr=self.lr, weight_decay=self.weight_decay)
        return optimizer, LambdaLR(optimizer, partial(_lr_factor, total_steps=total_steps))


class Block(nn.Module):
    """Causal self-attention, then a two-layer network at each position, both residual.

    `gelu` is the approximation of the function between the two layers: `tanh`, as in GPT-2, or `none`.
    """

    def __init__(self, width: int, heads: int, *, bias: bool = True, gelu: str = "tanh") -> None:
        super().__init__()
        self.heads, self.gelu = heads, gelu
        self.attention_norm = nn.LayerNorm(width)
        self.attend = nn.Linear(width, 3 * width, bias=bias)
        self.mix = nn.Linear(width, width, bias=bias)
        self.network_norm = nn.LayerNorm(width)
        self.widen = nn.Linear(width, 4 * width, bias=bias)
        self.shrink = nn.Linear(4 * width, width, bias=bias)

    def forward(self, features: Tensor) -> Tensor:
        """Return features of the same shape, (batch, length, width)."""
        features = features + self.mix(self._attended(self.attention_norm(features)))
        network: Tensor = self.shrink(functional.gelu(self.widen(self.network_norm(features)), approximate=self.gelu))
        return features + network

    def _attended(self, features: Tensor) -> Tensor:
        parts = self.attend(features).unflatten(2, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        query, key, value = parts  # each of shape (batch, heads, length, width / heads)
        attended = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        return attended.transpose(1, 2).flatten(2)


def init_weights(task: nn.Module, *, layers: int) -> None:
    """Initialize the weights of `layers` blocks and the embeddings around them as in GPT-2."""
    for name, parameter in task.named_parameters():
        if parameter.dim() == 2:
            # Keeps the size of the residual stream independent of the depth.
            depth = 2 * layers if name.endswith(("mix.weight", "shrink.weight")) else 1
            nn.init.normal_(parameter, std=_INITIAL_STD / math.sqrt(depth))
        elif name.endswith("bias"):
            nn.init.zeros_(parameter)


def make_adamw(task: nn.Module, *, lr: float, weight_decay: float) -> AdamW:
    """Return AdamW with weight decay for matrices only."""
    matrices = [parameter for parameter in task.parameters() if parameter.dim() >= 2]
    others = [parameter for parameter in task.parameters() if parameter.dim() < 2]
    groups = [{"params": matrices, "weight_decay": weight_decay}, {"params": others, "weight_decay": 0.0}]
    # The second beta of GPT-3: it forgets large gradients sooner than the default of 0.999.
    return AdamW(groups, lr=lr, betas=(0.9, 0.95))


class TokenWindows(Dataset[Tensor]):
    """Windows of a memory-mapped token file.

    Args:
        path: File of consecutive tokens.
        token_type: NumPy dtype of a token.
        context: Input tokens of a window, which has one more.

    """

    def __init__(self, path: Path, token_type: str, *, context: int) -> None:
        self.path, self.token_type, self.context = path, token_type, context
        self._mapped: Any = None
        num_tokens = path.stat().st_size // np.dtype(token_type).itemsize
        self._length = max(0, num_tokens - 1) // context

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: int) -> Tensor:
        # Opened in the process that reads: worker processes get the dataset without it.
        if self._mapped is None:
            self._mapped = np.memmap(self.path, dtype=self.token_type, mode="r")
        start = index * self.context
        # The last token of a window is the first of the next one.
        return torch.from_numpy(self._mapped[start : start + self.context + 1].astype(np.int64))

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_mapped": None}  # or the full file would be pickled for worker processes


class TokenFiles(Data):
    """Windows of the tokens of a folder of text; the last tenth of each file validates.

    One process tokenizes the text once and writes a folder in `tokens`; `tokens.json` in it records the source. Each
    text and tokenizer gets its own folder.

    Args:
        text: Folder of text, read recursively, or a file; `None`: the source files of the standard library.
        tokens: Folder of the token folders.
        tokenizer: `bytes` (plus an end-of-file token), `bpe` (learned from the text), or the name or folder of a
            pretrained tokenizer of the transformers package.
        vocabulary: Vocabulary size that `bpe` learns; for other tokenizers, their own.
        context: Input tokens of a window.
        max_bytes: Maximum size of all files together; `None`: no limit.
        batch_size: Windows of one optimizer step, over all ranks.
        evaluation_batch_size: Windows of one evaluation batch, over all ranks.
        num_workers: Worker processes that read samples; 0: the training process.

    """

    def __init__(
        self,
        *,
        text: str | None = None,
        tokens: str = "data/tokens",
        tokenizer: str = "bytes",
        vocabulary: int = 257,
        context: int = 128,
        max_bytes: int | None = None,
        batch_size: int = 32,
        evaluation_batch_size: int = 64,
        num_workers: int = 0,
    ) -> None:
        super().__init__(batch_size=batch_size, evaluation_batch_size=evaluation_batch_size, num_workers=num_workers)
        if context < 1:
            raise UserError(f"data.context must be at least 1 token, got {context}.")
        if tokenizer == "bytes" and vocabulary != _NUM_BYTES + 1:
            raise UserError(f"data.vocabulary={vocabulary} must be {_NUM_BYTES + 1} for data.tokenizer=bytes.")
        if tokenizer == "bpe" and vocabulary <= _NUM_BYTES + 1:
            raise UserError(f"data.vocabulary={vocabulary} must be above {_NUM_BYTES + 1} for data.tokenizer=bpe.")
        self.text = Path(sysconfig.get_path("stdlib")) if text is None else local_path(text, what="data.text")
        self.only_top = text is None
        self.tokens = local_path(tokens, what="data.tokens")
        self.tokenizer, self.vocabulary, self.context, self.max_bytes = tokenizer, vocabulary, context, max_bytes

    def dataset(self, stage: str) -> Dataset[Any]:
        """Return the windows of a stage; test and predict use the validation windows."""
        folder = self.prepare()
        token_type = json.loads((folder / "tokens.json").read_text(encoding="utf-8"))["token_type"]
        name = "train" if stage == "train" else "validation"
        return TokenWindows(folder / f"{name}.bin", token_type, context=self.context)

    def prepare(self) -> Path:
        """Return the folder of the token files, which are written first if they do not exist."""
        files = list(self._files())
        source = {
            "text": str(self.text.absolute()),
            "files": len(files),
            "bytes": sum(path.stat().st_size for path in files),
            "max_bytes": self.max_bytes,
            "tokenizer": self.tokenizer,
            "vocabulary": self.vocabulary,
        }
        # The name is a hash, so that other text or another tokenizer never reads these tokens.
        folder = self.tokens / hashlib.sha256(json.dumps(source).encode()).hexdigest()[:_NAME_LENGTH]
        prepare_folder(folder, make=lambda part: self._make(part, files=files, source=source))
        return folder

    def _files(self) -> Iterator[Path]:
        """Yield the text files by path, up to `max_bytes`."""
        if not self.text.exists():
            raise UserError(f"data.text={self.text} does not exist; give a folder of text, or a file.")
        paths = [self.text] if self.text.is_file() else self.text.glob("*.py" if self.only_top else "**/*")
        left = math.inf if self.max_bytes is None else self.max_bytes
        # Sorted, as file systems list folders in any order, and the order decides the tokens.
        for path in sorted(paths):
            if left > 0 and path.is_file() and path.stat().st_size >= _MIN_BYTES and _is_text(path):
                yield path
                left -= path.stat().st_size

    def _make(self, folder: Path, *, files: list[Path], source: dict[str, Any]) -> None:
        """Write `train.bin`, `validation.bin` and `tokens.json`."""
        if not files:
            raise UserError(f"data.text={self.text} has no text files of {_MIN_BYTES} bytes or more.")
        encode, vocabulary = _tokenizer(self.tokenizer, files, vocabulary=self.vocabulary, folder=folder)
        token_type = "uint16" if vocabulary <= 2**16 else "uint32"
        counts, left = {"train": 0, "validation": 0}, self.max_bytes
        with (folder / "train.bin").open("wb") as train, (folder / "validation.bin").open("wb") as validation:
            for path in files:
                text = path.read_bytes()[:left]
                left = None if left is None else left - len(text)
                tokens = np.asarray(encode(text), dtype=token_type)
                split = len(tokens) - int(_VALIDATION_FRACTION * len(tokens))
                for name, file, part in (("train", train, tokens[:split]), ("validation", validation, tokens[split:])):
                    part.tofile(file)
                    counts[name] += len(part)
        made = {**source, "token_type": token_type, "tokenizer_vocabulary": vocabulary, **counts}
        (folder / "tokens.json").write_text(json.dumps(made, indent=2) + "\n", encoding="utf-8")


def _is_text(path: Path) -> bool:
    with path.open("rb") as file:
        # A zero byte is in nearly every binary file, and in no text in UTF-8.
        return b"\0" not in file.read(4096)


def _tokenizer(name: str, files: list[Path], *, vocabulary: int, folder: Path) -> tuple[Encode, int]:
    """Return the function that tokenizes a text, with an end token, and the vocabulary size."""
    if name == "bytes":
        return _encode_bytes, _NUM_BYTES + 1
    try:
        if name == "bpe":
            return _train_bpe(files, vocabulary=vocabulary, folder=folder)
        from transformers import AutoTokenizer
    except ModuleNotFoundError as error:
        raise UserError(
            f"data.tokenizer={name} needs the package '{error.name}', which is not installed; type: "
            "pip install 'trainkit-torch[huggingface]'"
        ) from None
    try:
        pretrained = AutoTokenizer.from_pretrained(name)
    except (OSError, ValueError) as error:
        raise UserError(f"data.tokenizer={name} is not bytes, bpe or a tokenizer that can be loaded: {error}") from None
    end = [] if pretrained.eos_token_id is None else [pretrained.eos_token_id]
    return lambda text: pretrained(text.decode(errors="replace")).input_ids + end, len(pretrained)


def _encode_bytes(text: bytes) -> Any:
    return np.append(np.frombuffer(text, dtype=np.uint8).astype(np.uint16), np.uint16(_NUM_BYTES))


def _train_bpe(files: list[Path], *, vocabulary: int, folder: Path) -> tuple[Encode, int]:
    from tokenizers import ByteLevelBPETokenizer

    tokenizer = ByteLevelBPETokenizer()
    tokenizer.train([str(path) for path in files], vocab_size=vocabulary, special_tokens=[_END], show_progress=False)
    tokenizer.save(str(folder / "tokenizer.json"))
    end = tokenizer.token_to_id(_END)
    return lambda text: [*tokenizer.encode(text.decode(errors="replace")).ids, end], tokenizer.get_vocab_size()


def _lr_factor(step: int, *, total_steps: int) -> float:
    """Return the factor of the peak learning rate: warm-up over a twentieth of the steps, then cosine to a tenth."""
    warmup = max(1, round(_WARMUP * total_steps))
    if step < warmup:
        return (step + 1) / warmup
    done = min(1.0, (step - warmup) / max(1, total_steps - warmup))
    return _FINAL_LR + (1 - _FINAL_LR) * (0.5 + 0.5 * math.cos(math.pi * done))
