"""Signatures: the parameters of a `_target_` with their types, defaults and docs, read from the imported object."""

from __future__ import annotations

import inspect
import json
import os
import re
import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, MutableMapping, Sequence
from contextlib import suppress
from dataclasses import InitVar, dataclass, is_dataclass
from enum import Enum
from functools import cache, reduce
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from pkgutil import iter_modules
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin, is_typeddict

from trainkit.duration import Duration
from trainkit.errors import UserError, nearest

EXTRAS = {
    "sklearn": "recipes",
    "matplotlib": "plots",
    "pyarrow": "parquet",
    "transformers": "transformers",
    "torchmetrics": "metrics",
    "ray": "ray",
    "fsspec": "remote",
    "s3fs": "remote",
    "wandb": "wandb",
    "mlflow": "mlflow",
    "PIL": "images",
    "datasets": "huggingface",
    "tokenizers": "huggingface",
    "peft": "huggingface",
    "lightning": "lightning",
    "onnx": "onnx",
    "onnxscript": "onnx",
    "hydra_joblib_launcher": "sweeps",
    "hydra_optuna_sweeper": "sweeps",
    "hydra_submitit_launcher": "slurm",
}
"""Import names of the optional packages, each with the extra that installs it."""
MISSING = "???"
"""OmegaConf's mark of a mandatory value."""
_IMPORT_KEYS = frozenset({"_target_", "_args_", "comm_hook", "comm_hook_state", "functions"})
"""Keys whose values are imported, or may be: a positional argument has no name."""
_COMPILER_OPTIONS = "trainer.compile.options."
"""Start of the keys of the compiler's options, which name programs that it runs and folders that it imports from."""
Classes = tuple[type, ...]
_HYDRA_KEYS = ("_target_", "_partial_", "_recursive_", "_convert_", "_args_")
_KINDS: dict[Any, str] = {
    **{int: "int", float: "float", bool: "bool", str: "str", NoneType: "none"},
    **dict.fromkeys((list, tuple, set, Sequence, Iterable, Collection), "list"),
    **dict.fromkeys((dict, Mapping, MutableMapping), "dict"),
    Duration: "duration",
}
_CONTAINERS = tuple(kind for kind, name in _KINDS.items() if name in ("list", "dict"))
_WORDS = {
    "int": "a whole number",
    "float": "a number",
    "bool": "true or false",
    "str": "text",
    "none": "null",
    "list": "a list",
    "dict": "a mapping",
    "duration": "a duration such as 500step, 2epoch or 30min",
}
_DOCUMENTED_ARGUMENT = re.compile(r"^( +)(\*{0,2}\w+)(?: *\([^)]*\))?:\s*(.*)$")


class TargetError(UserError):
    """A `_target_` that cannot be imported or called."""


def install_hint(package: str) -> str:
    """Return a sentence with the command that installs `package`, given by its import name."""
    top = package.partition(".")[0]
    if top in EXTRAS:
        return f"Type: pip install 'trainkit-torch[{EXTRAS[top]}]'"
    return f"If it is your own, run trainkit in the folder that contains it; else: pip install {top}"


def is_installed(package: str) -> bool:
    """Return True if an optional package, given by its name in `EXTRAS`, is installed."""
    try:
        return find_spec(f"hydra_plugins.{package}" if package.startswith("hydra_") else package) is not None
    except ModuleNotFoundError:  # hydra_plugins itself, without any of its packages
        return False


@dataclass(frozen=True)
class ValueType:
    """The plain values that a parameter accepts: `kinds` of values (`None`: any) and single values, `choices`."""

    kinds: frozenset[str] | None
    choices: tuple[Any, ...] = ()
    element: ValueType | None = None
    """The type of the elements of a list and of the values of a mapping; `None` if it has neither."""
    key: ValueType | None = None
    """The type of the keys of a mapping; `None` if it has none."""
    positions: tuple[ValueType, ...] = ()
    """The type of each element, for a tuple of a fixed length."""
    classes: tuple[type, ...] = ()
    """The other classes; text can only stand for a path, or name a member of an enumeration, a dtype or a device."""

    def __or__(self, other: ValueType) -> ValueType:
        if self.kinds is None or other.kinds is None:
            return ANYTHING
        element = self.element | other.element if self.element and other.element else self.element or other.element
        key = self.key | other.key if self.key and other.key else self.key or other.key
        # Two lists of other lengths exclude each other position by position;
        # only one of them may say what stands where.
        positions = () if "list" in self.kinds & other.kinds else self.positions or other.positions
        classes = self.classes + other.classes
        return ValueType(self.kinds | other.kinds, self.choices + other.choices, element, key, positions, classes)

    def __str__(self) -> str:
        kinds = self.kinds or frozenset()
        words = [as_typed(choice) for choice in self.choices]
        words += [word for accepted_class in self.classes for word in _description(accepted_class)]
        words += [_WORDS[kind] for kind in _WORDS if kind in kinds and not (kind == "str" and "duration" in kinds)]
        return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} or {words[-1]}" if words else "anything"

    def error(self, value: Any, *, is_key: bool = False) -> str | None:
        """Return the error of `value`, `None` if it is accepted; interpolations and nodes with a `_target_` are."""
        kinds, kind = self.kinds, _KINDS.get(type(value), "")
        is_node = isinstance(value, Mapping) and "_target_" in value
        is_unresolved = isinstance(value, str) and ("${" in value or value == MISSING)
        # The type counts: True and 1 are equal in Python, and are different choices.
        is_choice = any(value == choice and type(value) is type(choice) for choice in self.choices)
        if kinds is None or not kind or is_node or is_unresolved or is_choice:
            return None
        # A list or text is read as durations; numbers and truth values only to
        # say in the error what is wrong with them.
        if "duration" in kinds and kind in ({"str", "list", "int", "float", "bool"} - kinds) | {"str", "list"}:
            return _duration_error(value)
        if kind in kinds or (kind == "int" and "float" in kinds):
            return self._element_error(value)
        if any(_accepts(accepted_class, value) for accepted_class in self.classes):
            return None
        names = [
            name
            for accepted_class in self.classes
            for name in [*_members(accepted_class), *_member_values(accepted_class)]
        ]
        near = nearest(str(value), [*map(str, self.choices), *names])
        if kind == "float" and value.is_integer() and "int" in kinds:
            near = f" Write {int(value)}."
        if "str" in kinds and kind in ("int", "float", "bool"):
            near = f" For text, write '\"{as_typed(value)}\"'."
            if is_key:  # Hydra's grammar has no quoted keys
                near = f" For text, quote it in a YAML file, or set the key that ends in '.{as_typed(value)}'."
        must_be = f"is not {self}" if self.choices or names else f"is {_WORDS[kind]}, but must be {self}"
        return f"{as_typed(value)} {must_be}.{near}"

    def objects(self, value: Any) -> Any:
        """Return a value with the objects that its texts stand for; text that is accepted as text stays text."""
        if isinstance(value, list):
            types = self.positions or [self.element or ANYTHING] * len(value)
            # Not strict: a wrong number of elements is an error that `error` has reported.
            return [kind.objects(item) for kind, item in zip(types, value, strict=False)]
        if isinstance(value, Mapping) and "_target_" not in value:
            key, element = self.key or ANYTHING, self.element or ANYTHING
            return {key.objects(name): element.objects(item) for name, item in value.items()}
        if self.kinds is None or _KINDS.get(type(value), "") in self.kinds:
            return value
        return next(
            (made for accepted_class in self.classes if (made := _object(accepted_class, value)) is not None), value
        )

    def _element_error(self, value: Any) -> str | None:
        """Return the error of the first key or element that is not accepted, or of the number of elements."""
        if not isinstance(value, (list, Mapping)):
            return None
        element, count = self.element or ANYTHING, len(self.positions)
        if isinstance(value, Mapping):
            errors = [(f"key {key}", (self.key or ANYTHING).error(key, is_key=True)) for key in value]
            errors += [(f"element {key}", element.error(item)) for key, item in value.items()]
        elif count and len(value) != count:
            return f"{as_typed(value)} must have {count} elements: {', '.join(map(str, self.positions))}."
        else:
            types = self.positions or [element] * len(value)
            errors = [(f"element {i}", kind.error(value[i])) for i, kind in enumerate(types)]
        return next((f"{position}: {message}" for position, message in errors if message is not None), None)


def _duration_error(value: Any) -> str | None:
    try:
        Duration.parse_all(value, where="it")
    except UserError as error:
        return str(error).removeprefix("it = ")
    return None


ANYTHING = ValueType(None)


def _accepts(kind: type, value: Any) -> bool:
    """Return True if a plain value stands for an object of a class, or if only its constructor can tell."""
    is_named = issubclass(kind, os.PathLike) or bool(_members(kind))
    is_never = isinstance(value, str) or (is_dataclass(kind) and isinstance(value, Mapping))
    return (not is_named and not is_never) or _object(kind, value) is not None


def _object(kind: type, value: Any) -> Any:
    """Return the object of a class that a plain value stands for; `None` if there is none."""
    if issubclass(kind, Enum):
        if isinstance(value, str) and value in kind.__members__:
            return kind[value]
        # A bool is an int, and would name the member with the value 1.
        with suppress(ValueError):
            return None if isinstance(value, bool) else kind(value)
    elif isinstance(value, str) and issubclass(kind, os.PathLike):
        return Path(value)
    elif isinstance(value, str) and kind is _of_torch("dtype") and value.removeprefix("torch.") in _members(kind):
        return _of_torch(value.removeprefix("torch."))
    elif isinstance(value, str) and kind is _of_torch("device"):
        # torch raises it for a device that it does not know.
        with suppress(RuntimeError):
            return kind(value)
    return None


def _members(kind: type) -> list[str]:
    """Return the names of all objects of a class, if it has names for them."""
    if issubclass(kind, Enum):
        return list(kind.__members__)
    # torch is imported already if an annotation is a dtype; it is not imported for a comparison.
    is_dtype = kind is _of_torch("dtype")
    return [name for name, value in vars(sys.modules["torch"]).items() if type(value) is kind] if is_dtype else []


def _member_values(kind: type) -> list[str]:
    return [member.value for member in kind if isinstance(member.value, str)] if issubclass(kind, Enum) else []


def _of_torch(name: str) -> Any:
    """Return an attribute of torch; of a type of its own if torch is not imported, for then no annotation names it."""
    return getattr(sys.modules.get("torch"), name, NotImplemented)


def _description(kind: type) -> list[str]:
    if issubclass(kind, os.PathLike):
        return ["a path"]
    if issubclass(kind, Enum):
        return _members(kind)
    if kind is _of_torch("dtype"):
        return ["a dtype such as bfloat16"]
    if kind is _of_torch("device"):
        return ["a device such as cuda:0"]
    return ["a class (by _target_)" if kind is type else f"an object of {kind.__qualname__} (by _target_)"]


@dataclass(frozen=True)
class Parameter:
    """One parameter that can be passed by name."""

    type: ValueType = ANYTHING
    required: bool = False
    default: Any = None
    """A plain value, or the `repr` of any other."""
    annotation: str = ""
    """As written in Python; empty without one."""
    doc: str = ""
    """From the docstring, on one line; empty without one."""
    classes: Classes | None = None
    """The classes in the annotation, at any depth; `None`: it accepts other objects too."""

    @property
    def type_text(self) -> str:
        """The type in plain English."""
        return self.annotation or "anything" if self.type.kinds is None else str(self.type)


@dataclass(frozen=True)
class Signature:
    """The parameters of a class or function that can be passed by name."""

    target: Any
    """The class or function itself."""
    parameters: dict[str, Parameter]
    accepts_any: bool = False
    """True if it has `**kwargs`."""
    summary: str = ""
    """The docstring's first paragraph, on one line."""

    def compare(self, arguments: Mapping[str, Any]) -> tuple[list[str], list[str], dict[str, str]]:
        """Return the names of unknown and of missing arguments, and the message for each of a wrong type."""
        parameters, is_partial = self.parameters, arguments.get("_partial_") or arguments.get("_args_")
        unknown = [name for name in arguments if name not in parameters and name not in _HYDRA_KEYS]
        missing = [name for name, parameter in parameters.items() if parameter.required and name not in arguments]
        errors = {name: parameters[name].type.error(value) for name, value in arguments.items() if name in parameters}
        wrong = {name: message for name, message in errors.items() if message is not None}
        return [] if self.accepts_any else unknown, [] if is_partial else missing, wrong

    def takes_by_position(self, count: int) -> bool:
        """Return True unless fewer arguments than `count` can be passed by position."""
        # Binds names only; nothing is called.
        try:
            inspect.signature(self.target).bind_partial(*[None] * count)
        except ValueError:  # a builtin without a signature
            return True
        except TypeError:
            return False
        return True


def import_paths(node: Any, path: str = "") -> Iterator[tuple[str, str]]:
    """Yield (key, name) for each class, function and program that the config below `path` names, or may name."""
    if isinstance(node, Mapping | list):
        for key, value in node.items() if isinstance(node, Mapping) else enumerate(node):
            yield from import_paths(value, f"{path}.{key}" if path else str(key))
    elif isinstance(node, str) and (
        path.startswith(_COMPILER_OPTIONS) or ("." in node and not _IMPORT_KEYS.isdisjoint(path.split(".")))
    ):
        yield path, node


# The jobs of a sweep and the pages of explain ask for the same few targets again and again.
@cache
def signature_of(target: str) -> Signature:
    """Return the signature of the class or function at the path `target`; raises TargetError if there is none."""
    component = imported(target)
    summary, docs = _documentation(component)
    constructor = component.__init__ if inspect.isclass(component) else component
    if getattr(constructor, "__qualname__", "") == "Module.__init__":  # torch's: takes anything, then refuses it
        return Signature(component, {}, summary=summary)
    try:
        signature = inspect.signature(component)
    except (ValueError, TypeError):  # a builtin without one
        return Signature(component, {}, accepts_any=True, summary=summary)
    module = inspect.getmodule(component)
    # Annotations may be text. An inherited constructor is in another module, whose names it uses.
    namespace = {**(vars(module) if module else {}), **getattr(inspect.unwrap(constructor), "__globals__", {})}
    inherited = _field_namespaces(component) if is_dataclass(component) else {}
    by_name = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    parameters = {
        name: _parameter(parameter, inherited.get(name, namespace), docs.get(name, ""))
        for name, parameter in signature.parameters.items()
        if parameter.kind in by_name
    }
    accepts_any = any(parameter.kind is parameter.VAR_KEYWORD for parameter in signature.parameters.values())
    return Signature(component, parameters, accepts_any, summary)


def with_objects(node: Any) -> Any:
    """Return a config with the paths, members of enumerations, dtypes and devices that texts in arguments stand for."""
    if isinstance(node, list):
        return [with_objects(item) for item in node]
    if not isinstance(node, Mapping):
        return node
    parameters: Mapping[str, Parameter] = {}
    if "_target_" in node:
        with suppress(TargetError):
            parameters = signature_of(str(node["_target_"])).parameters
    types = {name: parameters[name].type if name in parameters else ANYTHING for name in node}
    return {name: with_objects(types[name].objects(value)) for name, value in node.items()}


def as_typed(value: Any) -> str:
    """Return a value as it is typed on the command line, strings in quotes."""
    return "null" if value is None else str(value).lower() if isinstance(value, bool) else repr(value)


def read_docstring(docstring: str) -> tuple[str, dict[str, str]]:
    """Return a docstring's first paragraph and the text of each argument in `Args:`, each on one line."""
    lines = inspect.cleandoc(docstring).splitlines()
    paragraph = "\n".join(lines).split("\n\n")[0]
    start = next((index + 1 for index, line in enumerate(lines) if line.strip() in ("Args:", "Arguments:")), len(lines))
    arguments: dict[str, str] = {}
    indent, name = None, ""
    for line in lines[start:]:
        if line.strip() and not line.startswith(" "):
            break  # the next section
        match = _DOCUMENTED_ARGUMENT.match(line)
        if match and (indent is None or len(match[1]) <= indent):
            indent, name = len(match[1]), match[2].lstrip("*")
            arguments[name] = match[3].strip()
        elif name and line.strip():
            arguments[name] = f"{arguments[name]} {line.strip()}".strip()
    return " ".join(paragraph.split()), arguments


def imported(target: str) -> Any:
    """Return the class or function at a dotted path."""
    parts = target.split(".")
    if len(parts) < 2 or not all(part.isidentifier() for part in parts):
        raise TargetError(f"{target!r} is not a dotted path such as my_package.my_module.MyClass")
    length, component = len(parts), None
    # The longest prefix that is a module; what follows are its attributes, such as a nested class.
    while component is None and length > 1:
        length -= 1
        component = _module(parts[:length])
    if component is None:
        near = nearest(parts[0], [module.name for module in iter_modules([str(Path.cwd())])])
        raise TargetError(f"there is no module '{parts[0]}'.{near} {install_hint(parts[0])}")
    for depth, attribute in enumerate(parts[length:], start=length):
        if not hasattr(component, attribute):
            public = [name for name in dir(component) if not name.startswith("_")]
            public += [below.name for below in iter_modules(getattr(component, "__path__", []))]
            raise TargetError(f"{'.'.join(parts[:depth])} has no '{attribute}'.{nearest(attribute, public)}")
        component = getattr(component, attribute)
    if not callable(component):
        raise TargetError(f"{target} is a {type(component).__name__}, not a class or function.")
    return component


def _module(parts: Sequence[str]) -> Any:
    """Return the imported module, `None` if it does not exist."""
    name = ".".join(parts)
    try:
        return import_module(name)
    except ModuleNotFoundError as error:
        # Only the path of the target may be missing; a package that the module imports is another error.
        missing = error.name or name
        if missing == name or name.startswith(f"{missing}."):
            return None
        needs = f"{name} needs the package '{missing}', which is not installed"
        raise TargetError(f"{needs}. {install_hint(missing)}") from None
    except SyntaxError as error:
        raise TargetError(f"{name} has a syntax error: {error.msg} ({error.filename}:{error.lineno})") from None


def _parameter(parameter: inspect.Parameter, namespace: Mapping[str, Any], doc: str) -> Parameter:
    annotation, required = parameter.annotation, parameter.default is parameter.empty
    default = None if required else _plain(parameter.default)
    written = annotation if isinstance(annotation, str) else inspect.formatannotation(annotation)
    written = "" if annotation is parameter.empty else written
    return Parameter(
        _value_type(annotation, namespace), required, default, written, doc, _classes(annotation, namespace)
    )


def _field_namespaces(kind: Any) -> dict[str, Mapping[str, Any]]:
    """Return the names in the module of each field of a dataclass, which may be that of a base."""
    bases = [base for base in reversed(inspect.getmro(kind)) if is_dataclass(base)]
    return {name: vars(sys.modules[base.__module__]) for base in bases for name in inspect.get_annotations(base)}


def _value_type(annotation: Any, namespace: Mapping[str, Any]) -> ValueType:
    """Return the type of an annotation; one that cannot be evaluated accepts anything."""
    if isinstance(annotation, str):
        try:
            # The code of an annotation, from a module that is imported already.
            return _value_type(eval(annotation, dict(namespace)), namespace)
        except Exception:  # a name that only a type checker imports
            return ANYTHING
    annotation = annotation.type if isinstance(annotation, InitVar) else annotation
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is Literal:
        return ValueType(frozenset(), arguments)
    if origin is Annotated:
        return _value_type(arguments[0], namespace)
    if origin in (Union, UnionType):
        return reduce(ValueType.__or__, (_value_type(part, namespace) for part in arguments))
    return _type_of_class(NoneType if annotation is None else origin or annotation, arguments, namespace)


def _type_of_class(annotated: Any, arguments: Sequence[Any], namespace: Mapping[str, Any]) -> ValueType:
    """Return the type of a class with the `arguments` in its brackets; one that is no plain value accepts anything."""
    kind = _KINDS.get(annotated)
    if kind is None and _is_class(annotated) and not issubclass(annotated, str):
        return ValueType(frozenset(), classes=(annotated,))
    if kind not in ("list", "dict"):
        return ValueType(frozenset({kind})) if kind else ANYTHING
    # An unpacked part stands for any number of elements of types that are not looked at.
    types = [ANYTHING if _is_unpacked(part) else _value_type(part, namespace) for part in arguments if part is not ...]
    parts = types or [ANYTHING]
    element = parts[-1] if kind == "dict" else reduce(ValueType.__or__, parts)
    repeats = any(part is ... or _is_unpacked(part) for part in arguments)
    positions = () if repeats or annotated is not tuple else tuple(types)
    return ValueType(frozenset({kind}), (), element, parts[0] if kind == "dict" else None, positions)


def _is_unpacked(part: Any) -> bool:
    """Return True for `*tuple[...]` or `Unpack[...]` in the brackets of a tuple, which is any number of elements."""
    return getattr(part, "__unpacked__", False) or str(get_origin(part)).endswith(".Unpack")


def _classes(annotation: Any, namespace: Mapping[str, Any]) -> tuple[type, ...] | None:
    """Return the classes in an annotation, also in those of elements; `None` if it accepts other objects too."""
    if isinstance(annotation, str):
        try:
            annotation = eval(annotation, dict(namespace))
        except Exception:  # a name that only a type checker imports
            return None
    annotation = annotation.type if isinstance(annotation, InitVar) else annotation
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return _classes(arguments[0], namespace)
    if origin in (Union, UnionType) or origin in _CONTAINERS:
        parts = [_classes(part, namespace) for part in arguments if part is not ...]
        container = (origin,) if origin in _CONTAINERS else ()
        return None if None in parts else container + tuple(kind for part in parts for kind in part or ())
    kind = NoneType if annotation is None else origin or annotation
    return (kind,) if kind is not type and _is_class(kind) else None


def _is_class(kind: Any) -> bool:
    """Return True for a class to which not every object with the right methods or keys belongs."""
    # Private: typing has a public question for protocols from Python 3.13 on only.
    is_structural = is_typeddict(kind) or getattr(kind, "_is_protocol", False)
    accepts_any = kind in (Any, Callable, inspect.Parameter.empty, object)
    return isinstance(kind, type) and not accepts_any and not is_structural


def _plain(default: Any) -> Any:
    if isinstance(default, Enum):
        return default.name
    if isinstance(default, os.PathLike):
        return os.fspath(default)
    try:
        # Through JSON, which makes lists of tuples; what it cannot write, NaN included, is shown as its repr.
        return json.loads(json.dumps(default, allow_nan=False))
    except (TypeError, ValueError):
        return repr(default)


def _documentation(component: Any) -> tuple[str, dict[str, str]]:
    """Return the summary and the text of each argument, from a class or else from its bases."""
    docstring_of_class = vars(component).get("__doc__") if inspect.isclass(component) else component.__doc__
    summary, arguments = read_docstring(docstring_of_class or "")
    # The nearest class that documents an argument counts; object documents none.
    for base in component.__mro__[:-1] if inspect.isclass(component) else ():
        for docstring in (base.__doc__, getattr(vars(base).get("__init__"), "__doc__", None)):
            arguments = read_docstring(docstring or "")[1] | arguments
        summary = summary or read_docstring(base.__doc__ or "")[0]
    return summary, arguments
