"""What is wrong with the settings of a run, told all at once."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from difflib import SequenceMatcher

from trainkit.errors import UserError

_SHOWN = 12
# What other trainers call it.
_FAMILIAR = {
    **dict.fromkeys(
        ("max_epochs", "max_epoch", "epochs", "num_epochs", "max_steps", "max_time"), "trainer.max_duration"
    ),
    **dict.fromkeys(("val_check_interval", "check_val_every_n_epoch", "eval_interval"), "trainer.evaluate_every"),
    **dict.fromkeys(("log_every_n_steps", "log_interval", "logging_steps"), "trainer.log_every"),
    **dict.fromkeys(("gradient_clip_val", "clip_norm", "grad_clip", "clip_grad"), "trainer.max_grad_norm"),
    **dict.fromkeys(("accumulate_grad_batches", "gradient_accumulation_steps"), "strategy.accumulate"),
    **dict.fromkeys(("async", "async_save", "save_async", "async_checkpoint"), "callbacks.checkpoint.background"),
    **dict.fromkeys(("save_top_k", "save_total_limit"), "callbacks.checkpoint.keep_best"),
    **dict.fromkeys(("every_n_train_steps", "save_steps", "save_interval"), "callbacks.checkpoint.every"),
    "num_sanity_val_steps": "trainer.num_sanity_batches",
    "limit_val_batches": "trainer.limit_validation_batches",
    "dtype": "trainer.precision",
    "accelerator": "strategy.device",
    "gpus": "strategy.devices",
    "devices": "strategy.devices",
    "num_workers": "data.workers",
    "learning_rate": "task.lr",
}


@dataclass(frozen=True)
class Problem:
    """One thing that is wrong, at one key."""

    key: str
    """The key's full path (`trainer.max_duration`); empty for what is wrong with the whole."""
    message: str
    origin: str | None = None
    """Where the key comes from: what was typed, or a file and line; empty: nowhere, `None`: not looked up yet."""

    def __str__(self) -> str:
        what = f"{self.key}: {self.message}" if self.key else self.message
        return f"{what}\n    from {self.origin}" if self.origin else what


class SettingsError(UserError):
    """The settings cannot be run; the message lists every problem."""

    def __init__(self, problems: Sequence[Problem]) -> None:
        # The jobs of a sweep share most of their problems.
        self.problems = list({(problem.key, problem.message): problem for problem in problems}.values())
        count = len(self.problems)
        title = "" if count == 1 else f"{count} problems in the settings; nothing was started.\n\n"
        super().__init__(title + "\n".join(str(problem) for problem in self.problems))


def unknown_key(path: str, valid: Iterable[str], *, everywhere: Iterable[str]) -> Problem:
    """Return the problem of a key that is not among the `valid` ones at its place.

    `everywhere` are the full paths of all keys: what was typed may belong somewhere else.
    """
    parent, _, name = path.rpartition(".")
    paths = [f"{parent}.{key}" if parent else key for key in valid]
    known = {*paths, *everywhere}
    near = [_FAMILIAR[name]] if _FAMILIAR.get(name) in known else []
    # The same name elsewhere is nearer than another one here.
    named = known | {key.rpartition(".")[0] for key in known}  # and what holds keys
    near += [other for other in sorted(named) if other.rpartition(".")[2] == name]
    near = near or likely(path, paths)
    if not near:
        return Problem(path, f"unknown key. {there_are(paths)}")
    return Problem(path, f"unknown key. {did_you_mean(near)}")


def unknown_choice(group: str, name: str, options: Sequence[str]) -> str:
    """Return that a group has no such choice, with the nearest one and those there are."""
    near = likely(name, options)
    return f"unknown {group.removesuffix('s')} '{name}'. {did_you_mean(near) + ' ' if near else ''}{there_are(options)}"


def did_you_mean(near: Sequence[str]) -> str:
    """Return the question about the first one or two of the names."""
    return f"Did you mean {' or '.join(repr(name) for name in list(dict.fromkeys(near))[:2])}?"


def there_are(names: Sequence[str]) -> str:
    """Return the list of names, shortened where it is long."""
    if not names:
        return "There are none."
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return f"There are: {', '.join(names[:_SHOWN])}{more}."


def likely(name: str, valid: Sequence[str]) -> list[str]:
    """Return the valid name that `name` most likely meant, by its letters or a word that both have; at most one."""
    parent, _, last = name.lower().rpartition(".")

    def likeness(candidate: str) -> float:
        other = candidate.lower().removeprefix(f"{parent}.")
        ratio = SequenceMatcher(None, last, other).ratio()
        return ratio + (0.2 if set(last.split("_")) & set(other.split("_")) else 0.0)

    best = max(valid, key=likeness, default=None)
    return [best] if best is not None and likeness(best) >= 0.6 else []
