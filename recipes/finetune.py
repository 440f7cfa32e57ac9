"""A language model of the transformers package, pretrained or made from its configuration, trained on your text.

With `task.lora_rank=8` only small matrices beside the model's own are trained (LoRA, of the peft package).
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any

from torch import Tensor
from torch.utils.data import Dataset
from trainkit.recipes.gpt import TokenFiles

from trainkit.errors import UserError
from trainkit.integrations.huggingface import HuggingFaceTask

# Small enough to try everything on a laptop.
_SMALL: dict[str, Any] = {
    "model_type": "gpt2",
    "n_layer": 2,
    "n_head": 2,
    "n_embd": 64,
    "vocab_size": 257,
    "bos_token_id": 256,
    "eos_token_id": 256,
    **dict.fromkeys(("attn_pdrop", "embd_pdrop", "resid_pdrop"), 0.0),
}


class FineTune(HuggingFaceTask):
    """Trains a causal language model on windows of tokens.

    Args:
        pretrained: Name or folder of pretrained weights; a name may be downloaded.
        config: The model's configuration instead: `model_type` and whatever it takes; weights are then random. `None`
            without `pretrained`: a small GPT-2 of bytes.
        lora_rank: Rank of the matrices that are trained beside the model's own; `None`: the model itself is trained.
        lora_alpha: What is added counts by `lora_alpha / lora_rank`.
        lr: Highest learning rate of AdamW.
        weight_decay: Of AdamW, for matrices; biases and norms have none.
        schedule: How the learning rate goes on: `constant`, `linear` or `cosine`, both down to 0.
        warmup: Part of all steps over which the learning rate rises.

    """

    def __init__(
        self,
        *,
        pretrained: str | None = None,
        config: Mapping[str, Any] | None = None,
        lora_rank: int | None = None,
        lora_alpha: int = 16,
        lr: float = 3e-4,
        weight_decay: float = 0.01,
        schedule: str = "cosine",
        warmup: float = 0.05,
    ) -> None:
        if lora_rank is not None and lora_rank < 1:
            raise UserError(f"task.lora_rank must be at least 1, or null, got {lora_rank}.")
        super().__init__(
            auto_class="AutoModelForCausalLM",
            config=_SMALL if config is None and pretrained is None else config,
            pretrained=pretrained,
            learning_rate=lr,
            weight_decay=weight_decay,
            schedule=schedule,
            warmup=warmup,
        )
        if lora_rank is not None:
            _add_adapters(self.model, rank=lora_rank, alpha=lora_alpha)


class TokenRows(TokenFiles):
    """Windows of tokens as the models of the transformers package take them; a pretrained one needs its tokenizer."""

    def dataset(self, stage: str) -> Dataset[Any]:
        """Return rows with `input_ids` and `labels`; models compare each position with the next one themselves."""
        return _Rows(super().dataset(stage))


class _Rows(Dataset[Any]):
    def __init__(self, windows: Any) -> None:
        self.windows = windows

    def __len__(self) -> int:
        return len(self.windows)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        tokens: Tensor = self.windows[index][:-1]  # no longer than what models have positions for
        return {"input_ids": tokens, "labels": tokens}


def _add_adapters(model: Any, *, rank: int, alpha: int) -> None:
    """Put low-rank matrices beside every linear layer but the last, and leave only them to be trained."""
    try:
        from peft import LoraConfig, inject_adapter_in_model
    except ModuleNotFoundError:
        raise UserError(
            "task.lora_rank needs the package 'peft', which is not installed; type: pip install 'trainkit[huggingface]'"
        ) from None
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it says that it recognized the model's kind of layer
        inject_adapter_in_model(LoraConfig(r=rank, lora_alpha=alpha, target_modules="all-linear"), model)
