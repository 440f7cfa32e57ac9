"""Models of the transformers package with their own losses, as tasks."""

from __future__ import annotations

import copy
import inspect
import math
import re
import sys
import warnings
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Any

import torch
from annotated_types import Ge, Lt
from torch import Tensor, nn
from torch.optim import AdamW
from torch.optim.lr_scheduler import LambdaLR

from trainkit.errors import UserError, nearest
from trainkit.settings import check_arguments
from trainkit.storage import local_path
from trainkit.task import OptimizerSpec, TaskModule

IGNORED_LABEL = -100
"""The label that transformers' losses ignore."""
_NO_DECAY = re.compile(r"bias|layernorm|rmsnorm|(^|\.|_)norm($|\.)")
"""Names of parameters without weight decay, in transformers' Trainer too."""
_SCHEDULES = ("constant", "linear", "cosine")
_LORA = {"rank": None, "alpha": 16, "targets": "all-linear", "dropout": 0.0, "modules_to_save": None}
"""Settings of LoRA adapters, with their defaults."""
_HEADS = ("classifier", "score", "qa_outputs")
"""Names of heads that are new for each data, and so are trained as a whole beside adapters."""
_TASK_TYPES = {
    "ForCausalLM": "CAUSAL_LM",
    "LMHeadModel": "CAUSAL_LM",
    "ForConditionalGeneration": "SEQ_2_SEQ_LM",
    "ForSequenceClassification": "SEQ_CLS",
    "ForTokenClassification": "TOKEN_CLS",
    "ForQuestionAnswering": "QUESTION_ANS",
}
"""What peft calls the task of a class of models, by the end of its name."""


class HuggingFaceTask(TaskModule):
    """Trains any transformers model that computes its own loss, chosen by configuration alone.

        task:
          _target_: trainkit.integrations.huggingface.HuggingFaceTask
          auto_class: AutoModelForSequenceClassification
          config: {model_type: bert, hidden_size: 64, num_hidden_layers: 2, num_attention_heads: 2, num_labels: 3}

    A batch is a mapping of the model's arguments, with `labels`; columns that the model does not take are dropped.
    Rows of a `datasets` dataset in torch format are such batches as they are. Where labels are tokens, a micro-batch
    counts by the number of those that are not -100, so the loss is the mean over all tokens of the global batch.

    Args:
        auto_class: The class that makes the model, such as `AutoModelForCausalLM`.
        config: The model's configuration: `model_type` and its arguments; weights are then random.
        pretrained: Name or folder of pretrained weights, instead of `config`; a name may be downloaded.
        learning_rate: Of AdamW, after the warm-up.
        weight_decay: Of AdamW, for what transformers' Trainer decays: all but `LayerNorm` modules and parameters with
            `bias` or a norm in their names.
        schedule: How the learning rate goes on: `constant`, `linear` or `cosine`, both down to 0.
        warmup: Part of all steps over which the learning rate rises from 0, as `warmup_ratio` of transformers' Trainer.
        lora: LoRA adapters (Hu et al., 2021, by the peft package), which alone are trained: `rank`, `alpha` (16; their
            output is scaled by `alpha / rank`), `targets` (names of layers, or `all-linear`, which is every linear
            layer except the last), `dropout` (0) and `modules_to_save` (names of modules that are trained as a whole;
            by default the heads of classifiers). `None`, or a rank of `None`, trains the whole model.

    """

    def __init__(
        self,
        *,
        auto_class: str = "AutoModelForCausalLM",
        config: Mapping[str, Any] | None = None,
        pretrained: str | None = None,
        learning_rate: float = 5e-5,
        weight_decay: float = 0.01,
        schedule: str = "linear",
        warmup: Annotated[float, Ge(0), Lt(1), "it is a part of all steps"] = 0.0,
        lora: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__()
        if (config is None) == (pretrained is None):
            raise UserError("give one of task.config={model_type: gpt2, ...} and task.pretrained=NAME_OR_FOLDER.")
        if schedule not in _SCHEDULES:
            raise UserError(f"task.schedule={schedule!r} is unknown.{nearest(schedule, _SCHEDULES)}")
        check_arguments(HuggingFaceTask.__init__, locals(), of="task")
        adapters = _lora_settings(lora)
        self.learning_rate = learning_rate
        self.weight_decay = weight_decay
        self.schedule = schedule
        self.warmup = warmup
        self.model = make_model(auto_class, config=config, pretrained=pretrained)
        if adapters["rank"] is not None:
            _add_adapters(self.model, **adapters)
        # Read once, as every batch asks for it.
        self._columns = set(inspect.signature(self.model.forward).parameters)
        self._shifts_labels = type(self.model).__name__.endswith(("ForCausalLM", "LMHeadModel"))

    def forward(self, batch: Mapping[str, Any]) -> Any:
        """Return the model's output for the columns that it takes."""
        return self.model(**{name: value for name, value in batch.items() if name in self._columns})

    def training_step(self, batch: Mapping[str, Any]) -> dict[str, Tensor | float]:
        """Return the model's own loss, and its weight."""
        return self._measured(self(batch), batch)

    def validation_step(self, batch: Mapping[str, Any]) -> dict[str, Tensor | float]:
        """Return the loss, and for classifiers the accuracy."""
        output = self(batch)
        measured = self._measured(output, batch)
        labels, logits = batch.get("labels"), getattr(output, "logits", None)
        if isinstance(labels, Tensor) and labels.dim() == 1 and not labels.is_floating_point() and logits is not None:
            measured["accuracy"] = (logits.argmax(dim=-1) == labels).float().mean()
        return measured

    def predict_step(self, batch: Mapping[str, Any]) -> Tensor:
        """Return the logits."""
        logits: Tensor = self({name: value for name, value in batch.items() if name != "labels"}).logits
        return logits

    def configure_optimizers(self, total_steps: int | None = None) -> OptimizerSpec:
        """Return AdamW that decays what transformers' Trainer decays, with its schedule."""
        trained = {name: parameter for name, parameter in self.named_parameters() if parameter.requires_grad}
        # By id, as a parameter does not know its module.
        norms = {id(p) for module in self.modules() if isinstance(module, nn.LayerNorm) for p in module.parameters()}
        is_without = {name: bool(_NO_DECAY.search(name.lower())) or id(p) in norms for name, p in trained.items()}
        groups = [
            {"params": [p for name, p in trained.items() if not is_without[name]], "weight_decay": self.weight_decay},
            {"params": [p for name, p in trained.items() if is_without[name]], "weight_decay": 0.0},
        ]
        optimizer = AdamW([group for group in groups if group["params"]], lr=self.learning_rate)
        if self.schedule == "constant" and self.warmup == 0:
            return optimizer
        if total_steps is None:
            raise UserError(
                f"task.schedule={self.schedule} needs to know how long training takes; give max_duration in steps, "
                "samples, or epochs of data with a length, or set task.schedule=constant task.warmup=0."
            )
        return optimizer, LambdaLR(optimizer, LearningRateCurve(self.schedule, self.warmup, total_steps))

    def save_pretrained(self, folder: str | Path, *, adapter_only: bool = False) -> None:
        """Write the model for transformers' `from_pretrained`: its config, its weights as safetensors, its tokenizer.

        LoRA adapters are merged into the weights. With `adapter_only` they are written alone, in the format of peft.
        The tokenizer is that of the pretrained weights, if the model began with some.
        """
        folder = local_path(folder, what="the folder of save_pretrained")
        has_adapters = _has_adapters(self.model)
        if adapter_only and not has_adapters:
            raise UserError("the model has no adapter; train it with task.lora.rank=8, or export the whole model.")
        # The adapters have other names and shapes than what `from_pretrained` of the whole model looks for.
        model = _merged(self.model) if has_adapters and not adapter_only else self.model
        model.save_pretrained(folder)
        source = self.model.config.name_or_path
        if source:
            from transformers import AutoTokenizer

            with suppress(OSError, ValueError, TypeError):  # it has none; the last from transformers 4
                AutoTokenizer.from_pretrained(source).save_pretrained(folder)

    def _measured(self, output: Any, batch: Mapping[str, Any]) -> dict[str, Tensor | float]:
        if getattr(output, "loss", None) is None:
            raise UserError(
                f"{type(self.model).__name__} gave no loss; its batches need labels, and have "
                f"{', '.join(sorted(batch))}."
            )
        measured: dict[str, Tensor | float] = {"loss": output.loss}
        labels = batch.get("labels")
        if isinstance(labels, Tensor) and labels.dim() > 1 and not labels.is_floating_point():
            # A causal model predicts the next token: nothing predicts the first label.
            counted = labels[:, 1:] if self._shifts_labels else labels
            weight = measured["weight"] = (counted != IGNORED_LABEL).sum()
            measured["loss"] = torch.where(weight > 0, output.loss, 0.0)  # a mean over no token is NaN
        return measured


# A class and not a closure: torch saves the attributes of a callable object with its schedule, and a resume compares
# them.
class LearningRateCurve:
    """The factor of the learning rate at each step, as in transformers: a rise from 0, then what the schedule says."""

    def __init__(self, schedule: str, warmup: float, total_steps: int) -> None:
        self._schedule = schedule
        self._warmup_steps = math.ceil(warmup * total_steps)
        self._total_steps = total_steps

    def __call__(self, step: int) -> float:
        """Return the factor of `step`, counted from 0."""
        if step < self._warmup_steps:
            return step / self._warmup_steps
        done = min(1.0, (step - self._warmup_steps) / max(1, self._total_steps - self._warmup_steps))
        if self._schedule == "linear":
            return 1.0 - done
        return 1.0 if self._schedule == "constant" else 0.5 * (1.0 + math.cos(math.pi * done))


def _lora_settings(lora: Mapping[str, Any] | None) -> dict[str, Any]:
    for name in lora or {}:
        if name not in _LORA:
            raise UserError(f"task.lora.{name} is unknown.{nearest(name, list(_LORA))}")
    settings = {**_LORA, **(lora or {})}
    rank = settings["rank"]
    if rank is None and any(settings[name] != default for name, default in _LORA.items()):
        raise UserError(
            f"task.lora has no rank; type task.lora.rank=8, or no task.lora at all. It is {dict(lora or {})}."
        )
    if rank is not None and (not isinstance(rank, int) or rank < 1):
        raise UserError(f"task.lora.rank must be at least 1, or null, got {rank}.")
    return settings


def _add_adapters(
    model: Any,
    *,
    rank: int,
    alpha: float,
    targets: str | Sequence[str],
    dropout: float,
    modules_to_save: Sequence[str] | None,
) -> None:
    """Add LoRA adapters to a model, and freeze everything else."""
    try:
        from peft import LoraConfig
    except ModuleNotFoundError:
        raise UserError(
            "task.lora needs 'peft', which is not installed; type: pip install 'trainkit-torch[huggingface]'"
        ) from None
    if modules_to_save is None:
        modules_to_save = [name for name, _ in model.named_children() if name in _HEADS]
    config = LoraConfig(
        r=rank,
        lora_alpha=alpha,
        lora_dropout=dropout,
        target_modules=targets if isinstance(targets, str) else list(targets),
        modules_to_save=list(modules_to_save) or None,
        task_type=next((kind for end, kind in _TASK_TYPES.items() if type(model).__name__.endswith(end)), None),
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about the detected type of layer
        try:
            model.add_adapter(config)
        except ValueError as error:  # no layer has such a name, or transformers needs a newer peft
            raise UserError(f"task.lora cannot be added to targets={targets}: {error}") from error


def _has_adapters(model: Any) -> bool:
    # Private: transformers has no public question for adapters.
    return bool(getattr(model, "_hf_peft_config_loaded", False))


def _merged(model: Any) -> Any:
    """Return a copy of a model whose weights contain what its adapters add."""
    from peft.tuners.lora import LoraLayer
    from peft.utils import ModulesToSaveWrapper

    # A copy: the model may be trained on with its adapters.
    merged = copy.deepcopy(model)
    for name, module in list(merged.named_modules()):
        if isinstance(module, LoraLayer):
            module.merge()
            merged.set_submodule(name, module.get_base_layer())
        elif isinstance(module, ModulesToSaveWrapper):
            merged.set_submodule(name, module.modules_to_save[module.active_adapter])
    merged._hf_peft_config_loaded = False  # so that the whole model is saved
    return merged


def make_model(auto_class: str, *, config: Mapping[str, Any] | None, pretrained: str | None) -> Any:
    """Return a model from its configuration or its pretrained weights; raises UserError for what cannot be made."""
    try:
        import transformers
    except ImportError as error:
        raise UserError(
            "HuggingFaceTask needs the transformers package: pip install 'trainkit-torch[huggingface]'"
        ) from error
    factory = getattr(transformers, auto_class, None)
    if factory is None:
        names = [name for name in dir(transformers) if name.startswith("AutoModel")]
        raise UserError(f"task.auto_class={auto_class!r} is not in transformers.{nearest(auto_class, names)}")
    if pretrained is not None:
        try:
            return factory.from_pretrained(pretrained)
        except OSError as error:
            raise UserError(
                f"task.pretrained={pretrained} could not be loaded: it is not a folder with weights, and cannot be "
                "downloaded. Give the path of a folder, or task.config={model_type: ...} for random weights."
            ) from error
    settings = dict(config or {})
    kind = settings.pop("model_type", None)
    names = sorted(transformers.CONFIG_MAPPING.keys())
    if kind not in names:
        raise UserError(f"task.config.model_type={kind!r} is unknown.{nearest(str(kind), names)}")
    try:
        model = factory.from_config(transformers.AutoConfig.for_model(kind, **settings))
    except ValueError as error:
        raise UserError(f"task.config of model_type={kind} does not make a {auto_class}: {error}") from error
    _check_settings(model, settings)
    return model


def _check_settings(model: Any, settings: Mapping[str, Any]) -> None:
    """Raise UserError for a setting that the model does not read; transformers keeps any name."""
    made = model.config
    try:
        default = type(made)()
    except ValueError:  # of several models, which must be given
        return
    source = ""
    for name in settings:
        if name not in vars(made) or name in dir(default):
            continue
        # The source is read once, and only if a name is in doubt.
        source = source or inspect.getsource(sys.modules[type(model).__module__])
        if re.search(rf"\b{name}\b", source) is None:  # some read settings that their config does not declare
            names = [
                name_of_default for name_of_default in vars(default) if not name_of_default.startswith("_")
            ] + list(made.attribute_map)
            raise UserError(
                f"task.config.{name} is not a setting of model_type={made.model_type}.{nearest(name, names)}"
            )
