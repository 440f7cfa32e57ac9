"""Settings: the check of a constructor's arguments against its annotations, which the command line reads for types too.

    every: Annotated[int, Ge(1), Unit("steps")]                  a whole number of steps, at least 1
    decay: Annotated[float, Gt(0), Lt(1), "0.9 is usual"]        a number above 0 and below 1; 0.9 is usual
    mode: Literal["min", "max"]                                  min or max

Bounds and units are those of the package annotated-types; a text ends the message of a wrong number.
"""

from __future__ import annotations

import builtins
import math
import operator
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import InitVar, dataclass, is_dataclass
from functools import cache, wraps
from inspect import Parameter, get_annotations, getmro, signature, unwrap
from numbers import Integral, Real
from pathlib import Path
from types import MappingProxyType, NoneType, UnionType
from typing import Annotated, Any, Literal, ParamSpec, TypeVar, Union, cast, get_args, get_origin

from annotated_types import Ge, GroupedMetadata, Gt, Le, Lt, Unit

from trainkit.errors import UserError, nearest

_TYPES: Mapping[Any, tuple[str, ...]] = {
    bool: ("True", "False"),
    str: ("text",),
    Path: ("a Path",),
    NoneType: ("None",),
}
_NUMBERS: Mapping[Any, str] = {int: "a whole number", float: "a number"}
_ACCEPTED: Mapping[Any, type] = {int: Integral, float: Real}  # numpy's too
_BOUNDS: Mapping[type, tuple[str, str]] = {
    Ge: ("ge", "at least"),
    Gt: ("gt", "above"),
    Le: ("le", "at most"),
    Lt: ("lt", "below"),
}
"""Each kind of bound, with the name of its field, which is also that of the operator, and its words."""
FAMILIAR: Mapping[str, str] = {
    **dict.fromkeys(
        ("max_epochs", "max_epoch", "epochs", "num_epochs", "max_steps", "max_time"), "trainer.max_duration"
    ),
    **dict.fromkeys(("val_check_interval", "check_val_every_n_epoch", "eval_interval"), "trainer.evaluate_every"),
    **dict.fromkeys(("log_every_n_steps", "log_interval", "logging_steps"), "trainer.log_every"),
    **dict.fromkeys(("gradient_clip_val", "grad_clip", "clip_grad"), "trainer.max_grad_norm"),
    **dict.fromkeys(("accumulate_grad_batches", "gradient_accumulation_steps"), "strategy.accumulate"),
    **dict.fromkeys(("async", "save_async", "async_checkpoint"), "callbacks.checkpoint.async_save"),
    **dict.fromkeys(("every_n_train_steps", "save_steps", "save_interval"), "callbacks.checkpoint.every"),
    **dict.fromkeys(("gradient_checkpointing", "activation_checkpoint"), "trainer.activation_checkpointing"),
    "activation_offloading": "trainer.offload_activations",
    "cpu_offload": "strategy.offload",
    "save_total_limit": "callbacks.checkpoint.save_top_k",
    "num_sanity_val_steps": "trainer.num_sanity_batches",
    "limit_val_batches": "trainer.limit_validation_batches",
    "dataloader_num_workers": "data.num_workers",
    "dtype": "trainer.precision",
    "accelerator": "strategy.device",
    **dict.fromkeys(("devices", "gpus", "num_gpus", "num_processes", "nproc_per_node"), "strategy.devices"),
    **dict.fromkeys(("learning_rate", "lr"), "task.lr"),
    "batch_size": "data.batch_size",
    **dict.fromkeys(("train_dataloader", "train_dataloaders", "train_dataset"), "data.train"),
    **dict.fromkeys(("val_dataloaders", "val_dataloader", "eval_dataset"), "data.validation"),
    **dict.fromkeys(("ckpt_path", "resume_from_checkpoint"), "resume"),
}
"""Names in other frameworks, and the key that does the same; without a section an argument of `fit`."""
_P = ParamSpec("_P")
_R = TypeVar("_R")


@dataclass(frozen=True)
class _Limits:
    """The numbers that an annotation allows: those of `kind`, `int` or `float`, within the bounds in `metadata`."""

    kind: type
    metadata: tuple[Any, ...]

    def error(self, value: Any) -> str | None:
        """Return what a number must be, for a message; `None` if it is within the bounds, which NaN never is."""
        is_within = all(getattr(operator, field)(value, bound) for field, _, bound in self._bounds())
        # An amount of something, which is computed with: infinity would end in an OverflowError on the ranks.
        is_amount = any(isinstance(entry, Unit) for entry in self.metadata)
        if is_within and not (is_amount and math.isinf(value)):
            return None
        return f"must be {self}{', and finite' if is_within else ''}, got {value!r}{self.note}."

    @property
    def note(self) -> str:
        """The end of a message, from the texts in the annotation."""
        return "".join(f"; {entry}" for entry in self.metadata if isinstance(entry, str))

    def __str__(self) -> str:
        unit = next((f" of {entry.unit}" for entry in self.metadata if isinstance(entry, Unit)), "")
        # The largest seed is easier to read as a power.
        bounds = [f"{words} {'2**63 - 1' if bound == 2**63 - 1 else bound}" for _, words, bound in self._bounds()]
        comma = "," if bounds and bounds[0].startswith("at ") else ""
        return " ".join([f"{_NUMBERS[self.kind]}{unit}{comma}", " and ".join(bounds)]).rstrip()

    def _bounds(self) -> Iterator[tuple[str, str, Any]]:
        """Yield the field, the words and the value of each bound."""
        for entry in self.metadata:
            for bound in entry if isinstance(entry, GroupedMetadata) else (entry,):  # such as an Interval
                if type(bound) in _BOUNDS:
                    field, words = _BOUNDS[type(bound)]
                    yield field, words, getattr(bound, field)


def check_arguments(
    owner: Any, arguments: Mapping[str, Any], *, of: str = "", classes: Mapping[type, str] = MappingProxyType({})
) -> None:
    """Raise UserError for an argument that is not of the type, or not within the bounds, that it is annotated with.

    Args:
        owner: A dataclass, or an `__init__` with annotations.
        arguments: Its arguments by name; others are ignored.
        of: The name before that of an argument in messages.
        classes: Further classes that are checked, with their description; arguments of any other class are not.

    """
    for name, setting in _settings_of(owner, tuple(classes.items())).items():
        message = setting.error(arguments[name]) if name in arguments else None
        if message is not None:
            raise UserError(f"{of}{'.' if of else ''}{name}{message}")


def named_arguments(function: Callable[_P, _R]) -> Callable[_P, _R]:
    """Return a method that raises UserError with the nearest name for an argument that it does not have."""

    @wraps(function)
    def call(*values: _P.args, **named: _P.kwargs) -> _R:
        try:
            return function(*values, **named)
        except TypeError as error:
            # An error of the code within is no error of the call: it has the frame of the method, too.
            is_within = error.__traceback__ is not None and error.__traceback__.tb_next is not None
            message = None if is_within else _call_error(function, values, named)
            if message is None:
                raise
            raise UserError(message) from None

    return call


def _call_error(method: Callable[..., Any], values: Sequence[Any], named: Mapping[str, Any]) -> str | None:
    """Return what is wrong with the names or the number of arguments; `None` if they are right, or some are missing."""
    owner = method.__qualname__.removesuffix(".__init__")
    parameters = {name: parameter for name, parameter in signature(method).parameters.items() if name != "self"}
    by_position = [name for name, parameter in parameters.items() if parameter.kind is not Parameter.KEYWORD_ONLY]
    by_name = [name for name in parameters if name not in by_position]
    for name in named:
        if name not in parameters:
            section, _, meant = FAMILIAR.get(name, "").rpartition(".")
            if meant in parameters:
                hint = f" Did you mean {meant!r}?"
            elif meant:
                owner_of_it = f"of the {section.replace('.', ' ')}" if section else "of fit"
                hint = f" It is {meant!r} {owner_of_it}; on the command line {FAMILIAR[name]}."
            else:
                hint = nearest(name, parameters) or f" There are: {', '.join(parameters)}."
            return f"{owner} has no argument {name!r}.{hint}"
    if len(values) - 1 > len(by_position) and by_name:
        return f"{owner} takes arguments by name, such as {owner}({by_name[0]}=...)" + (
            f" after {' and '.join(by_position)}." if by_position else "."
        )
    return None


def check_choice(name: str, value: object, choices: Sequence[object]) -> None:
    """Raise UserError if the setting `name` is not one of the choices."""
    if value not in choices:
        names = [str(choice) for choice in choices]
        raise UserError(f"{name}{_unknown(value, names, names)}")


@dataclass(frozen=True)
class _Setting:
    classes: tuple[type, ...]
    limits: _Limits | None
    choices: tuple[Any, ...]
    names: tuple[str, ...]
    """The classes in words, without those of numbers."""

    def error(self, value: Any) -> str | None:
        # By type too: True and 1 are equal in Python, and are different choices.
        if any(value is choice or (type(value) is type(choice) and value == choice) for choice in self.choices):
            return None
        accepted = tuple(_ACCEPTED.get(kind, kind) for kind in self.classes)
        if not isinstance(value, accepted) or (isinstance(value, bool) and bool not in self.classes):
            words = [*map(str, self.choices), *self.names, *([str(self.limits)] if self.limits else [])]
            if self.choices and self.classes in ((), (NoneType,)):
                return _unknown(value, [str(choice) for choice in self.choices], words)
            return f" must be {_listed(words)}, got {value!r}{self.limits.note if self.limits else ''}."
        if self.limits is None or isinstance(value, bool) or not isinstance(value, Real):
            return None
        message = self.limits.error(value)
        return None if message is None else f" {message}"


# Annotations are text, whose evaluation takes longer than the check of all arguments.
@cache
def _settings_of(owner: Any, classes: Sequence[tuple[type, str]]) -> dict[str, _Setting]:
    """Return what is accepted, for each argument whose type can be checked."""
    annotations = _annotations(owner)
    words = {**_TYPES, **{kind: (word,) for kind, word in classes}}
    settings = {name: _setting(annotations[name], words) for name in signature(owner).parameters if name in annotations}
    return {name: setting for name, setting in settings.items() if setting is not None}


def _annotations(owner: Any) -> dict[str, Any]:
    """Return the annotations of a function, or of a dataclass with those that it inherits from dataclasses."""
    if not is_dataclass(owner):
        owner = unwrap(owner)
        return {name: _evaluated(hint, owner.__globals__) for name, hint in get_annotations(owner).items()}
    bases = [base for base in reversed(getmro(cast(type, owner))) if "__dataclass_params__" in vars(base)]
    names = {base: vars(sys.modules.get(base.__module__, builtins)) for base in bases}
    return {name: _evaluated(hint, names[base]) for base in bases for name, hint in get_annotations(base).items()}


def _evaluated(annotation: Any, names: Mapping[str, Any]) -> Any:
    """Return an annotation that may be text; `Any` for one with a name that only type checkers import."""
    try:
        # The code of an annotation, from a module that is imported already.
        return eval(annotation, dict(names)) if isinstance(annotation, str) else annotation
    except Exception:
        return Any


def _setting(annotation: Any, words: Mapping[Any, Sequence[str]]) -> _Setting | None:
    """Return what an annotation accepts; `None` if a part of it cannot be checked."""
    annotation = annotation.type if isinstance(annotation, InitVar) else annotation
    parts = get_args(annotation) if get_origin(annotation) in (Union, UnionType) else (annotation,)
    classes: list[type] = []
    choices: list[Any] = []
    names: list[str] = []
    limits = None
    for part in parts:
        if get_origin(part) is Literal:
            choices += get_args(part)
            continue
        kind, *metadata = get_args(part) if get_origin(part) is Annotated else (part,)
        kind = NoneType if kind is None else kind
        if kind in _NUMBERS:
            limits = _Limits(kind, tuple(metadata))
        elif kind not in words:
            return None
        classes.append(kind)
        names += words.get(kind, ())
    return _Setting(tuple(classes), limits, tuple(choices), tuple(names))


def _unknown(value: object, choices: Sequence[str], words: Sequence[str]) -> str:
    """Return the end of the message about a value that is no choice; `words` is all that is accepted."""
    return f"={value!r} is unknown.{nearest(str(value), choices)} Choose {_listed(words)}."


def _listed(words: Sequence[str]) -> str:
    return " or ".join(filter(None, (", ".join(words[:-1]), *words[-1:])))
