"""`trainkit export`: a checkpoint as a file that other programs read, its weights or the whole trained task."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from trainkit.command_line.cli import Arguments
from trainkit.command_line.extras import remedy
from trainkit.errors import UserError, nearest

_EXAMPLE = "trainkit export run=runs/digits/2026-01-31_12-00-00 out=model.safetensors"
_KEYS = ("run", "out", "checkpoint")


def export(arguments: Arguments) -> int:
    """Write a run's checkpoint: its weights to a `.safetensors` file, or the task as a program to a `.pt2` file."""
    typed = {key: arguments.take(key) for key in _KEYS}
    if typed["run"] is None and arguments.overrides and "=" not in arguments.overrides[0]:
        typed["run"] = arguments.overrides.pop(0)
    if not typed["run"] or not typed["out"]:
        raise UserError(f"export needs a run and a file to write. Type {_EXAMPLE}")
    run, out, which = Path(typed["run"]), Path(typed["out"]), typed["checkpoint"] or "last"
    if out.suffix == ".pt2":
        from trainkit.command_line.commands import settings_of_run
        from trainkit.command_line.program import export_program

        print(export_program(settings_of_run(arguments, run), run, out, which=which))
        return 0
    if arguments.overrides:
        key = arguments.overrides[0].partition("=")[0]
        raise UserError(f"export takes no {key!r}.{nearest(key, _KEYS)} Type {_EXAMPLE}")
    if out.suffix != ".safetensors":
        raise UserError(f"out={out} must end in .safetensors for the weights, or in .pt2 for a program.")
    print(export_weights(run, out, which=which))
    return 0


def export_weights(run: Path, out: Path, *, which: str = "last") -> str:
    """Write the checkpoint's parameters and buffers to `out` at one instant, and return a line that says so.

    Parameters that are tied are written under each of their names.
    """
    save_file = _save_file()
    from torch import Tensor

    from trainkit.checkpoints.store import load_from

    loaded = load_from(run, which)
    saved: dict[str, Any] = loaded.payload.get("evaluation_weights", loaded.payload["task"])
    # Copies: the format does not take tensors that share memory or have gaps.
    weights = {name: value.clone().contiguous() for name, value in saved.items() if isinstance(value, Tensor)}
    described = {"format": "pt", "step": str(loaded.entry.step), "task": str(loaded.payload["task_class"])}
    with whole_file(out) as part:
        save_file(weights, part, metadata=described)
    left_out = sorted(set(saved) - set(weights))
    without = f" without {', '.join(left_out)}, which are no tensors" if left_out else ""
    return f"{len(weights)} tensors of step {loaded.entry.step} in {out}{without}"


@contextmanager
def whole_file(out: Path) -> Iterator[Path]:
    """Give a path to write to; what is there after the block is `out`, on the disk. Raises UserError for the disk's."""
    from trainkit.checkpoints.disk import sync
    from trainkit.checkpoints.file import move, part_of

    part = part_of(out)
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        yield part
        with open(part, "rb") as file:
            sync(file.fileno())
        move(part, out)
    except OSError as error:
        raise UserError(f"{out} cannot be written: {error.strerror or error}.") from error
    finally:
        with suppress(OSError):
            part.unlink(missing_ok=True)


def _save_file() -> Any:
    try:
        from safetensors.torch import save_file
    except ImportError:
        raise UserError(f"export writes with the package safetensors. {remedy('safetensors')}") from None
    return save_file
