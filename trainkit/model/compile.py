"""Compilation: `torch.compile` of a task's forward or of its blocks, and a report of graphs, breaks and recompiles."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields
from pathlib import Path
from types import CodeType
from typing import Any

import torch
from torch import nn

from trainkit.errors import UserError, nearest
from trainkit.files import write_optional
from trainkit.model.transforms import modules_named
from trainkit.settings import check_arguments

REPORT = "compile.txt"
"""Name of the report in the run folder."""
_MOST_METRICS = 10_000  # compilations that torch remembers; 64 by default
logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Compilation:
    """The Trainer's argument `compile`: arguments of `torch.compile`, and the modules to compile."""

    mode: str | None = None
    options: Mapping[str, Any] | None = None
    backend: str | Callable[..., Any] = "inductor"
    fullgraph: bool = False
    dynamic: bool | None = None
    blocks: Sequence[str | type[nn.Module]] = ()
    """Name patterns or classes of modules, each compiled by itself; empty: the task's forward as one piece."""

    def __post_init__(self) -> None:
        check_arguments(Compilation.__init__, vars(self), of="compile")
        if not isinstance(self.blocks, Collection) or isinstance(self.blocks, str):
            raise UserError(
                f"compile.blocks={self.blocks!r} is not a list of patterns; write blocks=[{self.blocks!r}]."
            )
        if not (self.options is None or isinstance(self.options, Mapping)):
            raise UserError(f"compile.options={self.options!r} is not a mapping; write options={{max_autotune: true}}.")
        if self._settings:  # else the compiler, which takes seconds to import, need not be asked
            self._check_settings()

    @classmethod
    def parse(cls, value: object) -> Compilation | None:
        """Return the settings of `True` or a mapping, `None` of `False`; raises UserError for anything else."""
        if isinstance(value, bool):
            return cls() if value else None
        names = [field.name for field in fields(cls)]
        if not isinstance(value, Mapping):
            raise UserError(f"compile must be True, False or a mapping with {', '.join(names)}, got {value!r}.")
        for key in value:
            if key not in names:
                raise UserError(f"compile.{key} is unknown.{nearest(key, names)} There are: {', '.join(names)}.")
        return cls(**value)

    def check(self, task: nn.Module) -> None:
        """Raise UserError if a pattern matches nothing in the task, or what cannot be compiled."""
        self._chosen(task)

    def apply(self, task: nn.Module) -> None:
        """Compile in place: the keys of the state dict do not change.

        Without `blocks`, of a task that does not override `forward` each direct child module is compiled.
        """
        if not self.blocks and type(task).forward is not nn.Module.forward:
            task.compile(**self._settings)
            return
        codes: dict[object, CodeType] = {}  # torch counts compilations, and limits them, by code
        for module in self._chosen(task) if self.blocks else task.children():
            _compile_call(module, self._settings, codes)

    @property
    def _settings(self) -> dict[str, Any]:
        """The arguments of `torch.compile` that differ from its defaults."""
        chosen = {field.name: getattr(self, field.name) for field in fields(self) if field.name != "blocks"}
        chosen["options"] = None if self.options is None else dict(self.options)  # torch removes entries
        defaults = {field.name: field.default for field in fields(self)}
        return {name: value for name, value in chosen.items() if value != defaults[name]}

    def _check_settings(self) -> None:
        if isinstance(self.backend, str):
            # With no tags excluded: debugging backends such as eager and aot_eager are valid too.
            _check_name("backend", self.backend, torch._dynamo.list_backends(exclude_tags=()))
        if self.mode is not None:
            if self.backend != "inductor":
                raise UserError(f"compile.mode is a setting of backend=inductor, not of {self.backend}; remove it.")
            # The documentation of torch.compile refers to these functions of torch._inductor.
            _check_name("mode", self.mode, torch._inductor.list_mode_options())
        if self.options is not None and self.backend == "inductor":
            for name in self.options:
                # The last two are not options of inductor: torch.compile itself reads them.
                _check_name("options", name, [*torch._inductor.list_options(), "guard_filter_fn", "use_aoti"])
        try:
            # Compiles nothing until it is called, but refuses settings that
            # exclude each other, such as mode and options.
            torch.compile(_nothing, **self._settings)
        except RuntimeError as error:
            raise UserError(f"compile: {error}") from error

    def _chosen(self, task: nn.Module) -> list[nn.Module]:
        named = {name: module for name, module in task.named_modules() if name}
        chosen = modules_named("compile.blocks", self.blocks, named)
        for name, module in chosen.items():
            if type(module).forward is nn.Module.forward or isinstance(module, (nn.ModuleList, nn.ModuleDict)):
                raise UserError(
                    f"compile.blocks: {name} is a {type(module).__name__}, which has no forward; name the modules in "
                    f"it: blocks=['{name}.*']."
                )
        # A block inside another chosen block is compiled with that one, and not a second time.
        inside = {inner for name in chosen for inner in chosen if inner.startswith(f"{name}.")}
        return [module for name, module in chosen.items() if name not in inside]


def _check_name(setting: str, name: str, valid_names: Collection[str]) -> None:
    if name not in valid_names:
        listed = f" There are: {', '.join(valid_names)}." if len(valid_names) < 30 else ""
        raise UserError(f"compile.{setting}: {name!r} is unknown.{nearest(name, valid_names)}{listed}")


def _nothing() -> None:
    """Stands for what is compiled, where only the settings are checked."""


def _compile_call(module: nn.Module, settings: Mapping[str, Any], codes: dict[object, CodeType]) -> None:
    """Compile a module's call as `module.compile()` does, also for modules of torch; equal ones share graphs."""

    def inlined(*inputs: Any, **named: Any) -> Any:
        # A frame outside torch: the compiler skips calls whose outermost frame is torch's. Not by a bound method, which
        # is another object for each module: torch 2.8 would compile equal modules again, and from the ninth on none.
        return module._call_impl(*inputs, **named)

    kind = type(module)
    key = kind, *(parameter.shape for parameter in module.parameters())
    # torch keeps its graphs by code object: with one for all equal modules the first compiles, and the others reuse it.
    # The name is what `_name` shows in the report.
    inlined.__code__ = codes.setdefault(key, inlined.__code__.replace(co_name=kind.__name__))
    # Private: what Module.compile sets, which gives no way to compile another function instead.
    module._compiled_call_impl = torch.compile(inlined, **settings)


@contextmanager
def compilation_reported(folder: Path | None) -> Iterator[None]:
    """Log how many graphs were compiled in the block, and list breaks and recompiles in `folder`; not with `None`."""
    # Private: torch shows these counts only in its logs. Here, since the import takes seconds.
    from torch._dynamo import utils

    utils.set_compilation_metrics_limit(_MOST_METRICS)
    graphs = utils.counters["stats"]["unique_graphs"]
    # The counts are those of the process: an earlier run in it has added to them.
    breaks, compilations = len(utils.graph_break_reasons), len(utils.get_compilation_metrics())
    try:
        yield
    finally:
        graphs = utils.counters["stats"]["unique_graphs"] - graphs
        broken = Counter(
            f"{_place(reason.user_stack)}: {_first_line(reason.reason)}"
            for reason in utils.graph_break_reasons[breaks:]
        )
        recompiled = Counter(
            f"{_name(compilation)}: {_first_line(compilation.recompile_reason)}"
            for compilation in utils.get_compilation_metrics()[compilations:]
            if compilation.recompile_reason
        )
        summary = f"compiled graphs: {graphs}, graph breaks: {broken.total()}, recompiles: {recompiled.total()}"
        if folder is not None:
            logger.info("%s (see %s)", summary, REPORT)
            lines = [summary, *_section("graph breaks", broken), *_section("recompiles", recompiled)]
            write_optional(folder / REPORT, "\n".join(lines) + "\n")


def _section(title: str, counts: Counter[str]) -> list[str]:
    return ["", title, *(f"{count:5d} x {text}" for text, count in counts.most_common())] if counts else []


def _place(stack: Sequence[Any]) -> str:
    return f"{stack[-1].filename}:{stack[-1].lineno}" if stack else "unknown line"


def _name(compiled: Any) -> str:
    """Return the name of the compiled function and its line; of a module's call, the name of the class."""
    where = "" if compiled.co_filename == __file__ else f"{compiled.co_filename}:{compiled.co_firstlineno} "
    return f"{where}{compiled.co_name}"


def _first_line(text: str) -> str:
    return text.strip().partition("\n")[0]
