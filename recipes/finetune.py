"""Fine-tuning of a causal language model of the transformers package, optionally with LoRA.

`task.lora.rank=8` trains only low-rank adapters (LoRA, by the peft package).

Needs the extra `huggingface`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor
from torch.utils.data import Dataset
from trainkit.recipes.gpt import TokenFiles

from trainkit.integrations.huggingface import HuggingFaceTask

_SMALL: dict[str, Any] = {  # enough for a laptop
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
        config: Configuration of a model with random weights instead: `model_type` and its arguments. If `pretrained` is
            `None` too, a small GPT-2 of bytes.
        lora: LoRA adapters, which alone are trained: `rank`, `alpha`, `targets` and `dropout`, as in `HuggingFaceTask`;
            a rank of `None` trains the full model.
        lr: Peak learning rate of AdamW.
        weight_decay: Weight decay of AdamW, for matrices only.
        schedule: Learning-rate schedule after warm-up: `constant`, or `linear` or `cosine` to zero.
        warmup: Fraction of all steps over which the learning rate warms up.

    """

    def __init__(
        self,
        *,
        pretrained: str | None = None,
        config: Mapping[str, Any] | None = None,
        lora: Mapping[str, Any] | None = None,
        lr: float = 3e-4,
        weight_decay: float = 0.01,
        schedule: str = "cosine",
        warmup: float = 0.05,
    ) -> None:
        super().__init__(
            auto_class="AutoModelForCausalLM",
            config=_SMALL if config is None and pretrained is None else config,
            pretrained=pretrained,
            learning_rate=lr,
            weight_decay=weight_decay,
            schedule=schedule,
            warmup=warmup,
            lora=lora,
        )


class TokenRows(TokenFiles):
    """Windows of tokens in the format of the transformers package; a pretrained model needs its own tokenizer."""

    def dataset(self, stage: str) -> Dataset[Any]:
        """Return rows with `input_ids` and `labels`; models shift the labels themselves."""
        return _Rows(super().dataset(stage))


class _Rows(Dataset[Any]):
    def __init__(self, windows: Any) -> None:
        self.windows = windows

    def __len__(self) -> int:
        return len(self.windows)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        tokens: Tensor = self.windows[index][:-1]  # at most as long as the model's context
        return {"input_ids": tokens, "labels": tokens}
