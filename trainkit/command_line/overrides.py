"""What was typed to change settings, in Hydra's grammar."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException, OverrideParseException

from trainkit.command_line.problem import Problem, did_you_mean, likely, unknown_choice

# Groups of which several choices stand side by side, each under its name.
LISTS = ("callbacks", "logger")
GROUPS = ("recipe", "size", "strategy", *LISTS)
SIZES = "recipe_size"  # the group of what sizes mean: <recipe>_<size>
FULL = "full"  # the size of a recipe's own file


@dataclass(frozen=True)
class _Part:
    text: str
    override: Override
    is_group: bool

    @property
    def key(self) -> str:
        return self.override.key_or_group

    @property
    def is_sweep(self) -> bool:
        return self.override.is_sweep_override()

    @property
    def values(self) -> list[str]:
        """The override, or one for each value of a sweep."""
        if not self.is_sweep:
            return [self.text]
        return [f"{self.override.get_key_element()}={value}" for value in self.override.sweep_string_iterator()]

    @property
    def names(self) -> list[str]:
        """What is chosen in a group."""
        if self.is_sweep:
            values: list[Any] = [_plain(value) for value in self.override.sweep_iterator()]
        else:
            values = [self.override.value()]
        chosen = [name for value in values for name in (value if isinstance(value, list) else [value])]
        return [str(name) for name in chosen if name is not None]


class Overrides:
    """Overrides, read; what cannot be read or chosen is left out, and told in `problems`.

    `callbacks=[a,b]` and `logger=...` replace what is chosen; `+callbacks=c` adds to it.
    """

    def __init__(self, texts: Sequence[str], *, options: Callable[[str], list[str]], sweep: bool = False) -> None:
        self.problems: list[Problem] = []
        self._options = options
        self._sweep = sweep
        self._parts = [part for text in texts for part in self._read(text)]

    @property
    def typed(self) -> list[tuple[str, str]]:
        """Each key with the text that changes it."""
        return [(part.key, part.text) for part in self._parts]

    @property
    def choices(self) -> list[str]:
        """The groups in which something is chosen."""
        return [part.key for part in self._parts if part.is_group]

    @property
    def deletions(self) -> list[tuple[str, str]]:
        """The keys to take away, with what was typed."""
        return [(part.key, part.text) for part in self._parts if _is_deletion(part)]

    @property
    def replaced_groups(self) -> list[str]:
        """The groups in which a new choice takes the place of the old one."""
        return [part.key for part in self._parts if part.is_group and not _is_addition(part)]

    @property
    def additions(self) -> dict[str, list[str]]:
        """What is added to groups of several choices."""
        added: dict[str, list[str]] = {}
        for part in self._parts:
            if _is_addition(part):
                added.setdefault(part.key, []).extend(part.names)
        return added

    def jobs(self) -> list[list[str]]:
        """Return the overrides of each combination of values; ranges that only a sweeper can sample are left out."""
        values = [part.values for part in self._parts if part.override.is_discrete_sweep() or not part.is_sweep]
        return [list(texts) for texts in product(*values)]

    def rendered(self, chosen: Mapping[str, Sequence[str]], *, deletions: Collection[str] = ()) -> list[str]:
        """Return what Hydra is given, of deletions only those of the keys in `deletions`.

        `chosen` is what additions to groups are added to.
        """
        lines = []
        for part in self._parts:
            replaced = part.key in chosen and part.is_group and not part.is_sweep
            if replaced or _is_addition(part) or (_is_deletion(part) and part.key not in deletions):
                continue
            lines.append(_line(part))
        for group, names in self.additions.items():
            if group in chosen:
                lines.append(f"{group}=[{','.join(dict.fromkeys([*chosen[group], *names]))}]")
        if "~recipe" in lines:  # there is none by default, and sizes are looked up by its name
            lines = [line for line in lines if line != "~recipe" and not line.startswith("recipe=")]
        return lines

    def _read(self, text: str) -> list[_Part]:
        try:
            override = OverridesParser.create().parse_override(text)
        except (OverrideParseException, HydraException) as error:
            self.problems.append(_unreadable(text, error))
            return []
        options = self._options(override.key_or_group)
        is_value = not options or (not override.is_delete() and isinstance(override.value(), dict))
        part = _Part(text, override, is_group=not is_value)
        problem = self._wrong(part, options)
        if problem is not None:
            self.problems.append(Problem(part.key, problem, f"the command line: {text}"))
            return []
        return [part]

    def _wrong(self, part: _Part, options: list[str]) -> str | None:
        if part.is_sweep and not self._sweep:
            values = part.text.partition("=")[2]
            return f"several values; add -m to try one after the other, or write [{values}] for a list"
        if part.is_group and part.key == "size" and not part.names:
            return f"cannot be taken away; size={FULL} leaves a recipe as its own file says"
        if not part.is_group or part.override.is_delete():
            return None
        if part.key in GROUPS and part.key not in LISTS and isinstance(part.override.value(), list):
            return "takes one choice, not a list"
        for name in part.names:
            if name not in options:
                return unknown_choice(part.key, name, options)
        return None


def _line(part: _Part) -> str:
    """Return what Hydra is given for one override."""
    text = part.text.lstrip("+")
    if part.override.is_hydra_override() or part.override.is_delete() or "@" in text.partition("=")[0]:
        return part.text
    if part.is_group and part.override.value() is None:
        return f"{part.key}=[]" if part.key in LISTS else f"~{part.key}"
    if part.is_group:
        return text if part.key in GROUPS else part.text
    return f"++{text}"  # Without ++ Hydra itself refuses an unknown key, and advises to add it.


def _is_addition(part: _Part) -> bool:
    return part.is_group and part.key in LISTS and part.text.startswith("+")


def _is_deletion(part: _Part) -> bool:
    return part.override.is_delete() and not part.is_group


def _plain(value: Any) -> Any:
    return getattr(value, "text", value)  # a quoted string


def _unreadable(text: str, error: Exception) -> Problem:
    if "=" not in text and not text.startswith("~"):
        near = did_you_mean(likely(text, [])) if likely(text, []) else ""
        return Problem("", f"'{text}' is no setting; write key=value.{near}")
    reason = str(error).splitlines()[0]
    key, _, value = text.partition("=")
    return Problem("", f"'{text}' cannot be read: {reason}. Special characters need quotes: {key}='\"{value}\"'")
