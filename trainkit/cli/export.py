"""`trainkit export`: a checkpoint's weights as safetensors, its task as a program, or its model for transformers."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, BinaryIO

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map  # private: the tree that torch.export's dynamic_shapes must match

from trainkit.checkpoint.frozen_weights import FROZEN, check_frozen, completed
from trainkit.checkpoint.resized_buffers import RESIZED, resize_buffers
from trainkit.checkpoint.serialization import saved_weights
from trainkit.checkpoint.sharded_state import StoredTensor, in_memory
from trainkit.checkpoint.store import load_from
from trainkit.cli.compose import Settings
from trainkit.cli.main import Arguments
from trainkit.cli.run_commands import RunComponents, assemble, checkpoint_path, settings_of_run, whole_file
from trainkit.cli.signatures import install_hint, is_installed
from trainkit.data.data import Data
from trainkit.data.loader import open_loader
from trainkit.errors import UserError, nearest
from trainkit.model.deferred_init import make_real
from trainkit.storage import local_path
from trainkit.strategy import Strategy
from trainkit.task import TaskModule

_EXAMPLE = "trainkit export checkpoint=runs/digits/2026-01-31_12-00-00 out=model.safetensors"
_KEYS = ("checkpoint", "out", "format")
_FORMATS = ("safetensors", "torch_export", "onnx", "huggingface", "peft")
_BY_SUFFIX = {".pt2": "torch_export", ".onnx": "onnx"}
_ONNX_BYTES = 2**31 - 1  # of a file, in the format of protobuf
_DTYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint64: "U64",
    torch.uint32: "U32",
    torch.uint16: "U16",
    torch.uint8: "U8",
    torch.bool: "BOOL",
    torch.complex64: "C64",
}
"""Their names in the format of safetensors."""
_STAGES = ("predict", "test", "validation", "train")


def export(arguments: Arguments) -> int:
    """Write weights to a `.safetensors` file, a program to a `.pt2` or `.onnx` file, or a model to a folder."""
    typed = arguments.take("out")
    if not typed:
        raise UserError(f"export needs a checkpoint and an output file. Type {_EXAMPLE}")
    out = local_path(typed, what="out")
    name = arguments.take("format") or _BY_SUFFIX.get(out.suffix, "safetensors")
    if name not in _FORMATS:
        raise UserError(f"format={name} is unknown.{nearest(name, _FORMATS)} Valid: {', '.join(_FORMATS)}.")
    path = checkpoint_path(arguments)
    if name in {"huggingface", "peft"}:
        print(export_model(settings_of_run(arguments, path), path, out, adapter_only=name == "peft"))
        return 0
    if name in _BY_SUFFIX.values():
        write = export_onnx if name == "onnx" else export_program
        print(write(settings_of_run(arguments, path), path, out))
        return 0
    if arguments.overrides:
        key = arguments.overrides[0].partition("=")[0]
        raise UserError(f"export does not take {key!r}.{nearest(key, _KEYS)} Type {_EXAMPLE}")
    if out.suffix != ".safetensors":
        raise UserError(
            f"out={out} must end in .safetensors for the weights, or in .pt2 or .onnx for a program; a folder for "
            "transformers is written with format=huggingface, and one for peft with format=peft."
        )
    print(export_weights(path, out))
    return 0


def export_weights(path: Path, out: Path) -> str:
    """Write the parameters and buffers of a run's last checkpoint, or of one file, to `out`; return a summary.

    Tied parameters are written under each of their names.
    """
    loaded = load_from(path)
    saved = saved_weights(loaded.payload, str(path))
    weights = {name: value for name, value in saved.items() if isinstance(value, (Tensor, StoredTensor))}
    described = {"format": "pt", "step": str(loaded.entry.step), "task": str(loaded.payload.get("task_class"))}
    with whole_file(out) as part, open(part, "wb") as file:
        write_safetensors(file, weights, described)
    skipped = sorted(set(saved) - set(weights))
    without = f" without {', '.join(skipped)}, which are not tensors" if skipped else ""
    frozen = loaded.payload.get(FROZEN, {}).get("dtypes", {})
    without += f" without {len(frozen)} frozen parameters, which are not in the checkpoint" if frozen else ""
    return f"{len(weights)} tensors of step {loaded.entry.step} in {out}{without}"


def write_safetensors(
    file: BinaryIO, tensors: Mapping[str, Tensor | StoredTensor], described: Mapping[str, str]
) -> None:
    """Write tensors in the format of safetensors, of which one at a time is in memory.

    8 bytes     the length of the header, the lowest byte first
    header      JSON with each name's dtype, shape and place in the bytes; its length is a multiple of 8
    bytes       of one tensor after the other
    """
    # Those of larger elements come first, so that each is aligned.
    names = sorted(tensors, key=lambda name: (-tensors[name].dtype.itemsize, name))
    header: dict[str, Any] = {"__metadata__": dict(described)}
    position = 0
    for name in names:
        tensor = tensors[name]
        if tensor.dtype not in _DTYPES:
            raise UserError(f"{name} is {tensor.dtype}, which a .safetensors file cannot hold.")
        offsets = [position, position + tensor.shape.numel() * tensor.dtype.itemsize]
        header[name] = {"dtype": _DTYPES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": offsets}
        position = offsets[1]
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    file.write(len(text).to_bytes(8, "little") + text)
    for name in names:
        file.write(_content(tensors[name]))


def _content(saved: Tensor | StoredTensor) -> Any:
    """Return the bytes of a tensor, row by row."""
    tensor = saved if isinstance(saved, Tensor) else in_memory(saved)
    # As bytes, since numpy has no bfloat16 and no 8-bit floats.
    return tensor.reshape(-1).view(torch.uint8).numpy()


# ---- Programs


def export_program(settings: Settings, path: Path, out: Path) -> str:
    """Write the task's `predict_step`, with a checkpoint's weights, to `out` by torch.export; return a summary.

    It is traced on the CPU with one batch of the run's data; only the number of rows may differ later:

        program = torch.export.load("model.pt2").module()
        predictions = program(batch)
    """
    run, step = _trained(settings, path)
    batch, num_samples = _first_batch(run.data)
    program = _traced(run.task, batch, num_samples)
    with whole_file(out) as part, open(part, "wb") as file:
        torch.export.save(program, file)
    name = type(run.task).__name__
    return f"{name}.predict_step of step {step} in {out}; torch.export.load('{out}').module() runs it"


def export_onnx(settings: Settings, path: Path, out: Path) -> str:
    """Write the same program to `out` in the format of ONNX; return a summary.

    Tensors of the batch are the program's inputs, used or not, and those of the predictions its outputs, in order.
    """
    _check_onnx_installed()
    run, step = _trained(settings, path)
    name = type(run.task).__name__
    size = sum(tensor.nbytes for tensor in run.task.state_dict().values() if isinstance(tensor, Tensor))
    if size > _ONNX_BYTES:
        raise UserError(f"the weights of {name} have {size:,} bytes, and one ONNX file at most 2 GiB; out=model.pt2.")
    program = _traced(run.task, *_first_batch(run.data))
    try:
        # The exporter that takes a traced program; the older one would trace the module itself.
        converted = torch.onnx.export(program, dynamo=True, verbose=False)
    except torch.onnx.errors.OnnxExporterError as error:
        first = str(error.__cause__ or error).strip().partition("\n")[0]
        raise UserError(
            f"{name}.predict_step cannot be converted to ONNX: {first} Type out=model.pt2 for a program of PyTorch."
        ) from error
    assert converted is not None
    with whole_file(out) as part:
        converted.save(part, external_data=False)
    inputs = ", ".join(str(value.name) for value in converted.model.graph.inputs)
    return f"{name}.predict_step of step {step} in {out}, with the inputs {inputs}"


def _check_onnx_installed() -> None:
    for package in ("onnx", "onnxscript"):
        if not is_installed(package):
            raise UserError(
                f"format=onnx needs the package '{package}', which is not installed. {install_hint(package)}"
            )


def _trained(settings: Settings, path: Path) -> tuple[RunComponents, int]:
    """Return the objects of a run, its task with the weights of a checkpoint, and the checkpoint's step."""
    run = assemble(settings, run_dir=None, loggers=False)
    loaded = load_from(path)
    # Before the weights are read into it: a deferred task has no memory.
    make_real(run.task)
    record, task_state = loaded.payload.get(FROZEN) or None, run.task.state_dict()
    if record is not None:
        check_frozen(record, task_state, str(path))
    saved = completed(saved_weights(loaded.payload, str(path)), record, task_state)
    # Before load_state_dict, which refuses buffers of another shape.
    resize_buffers(run.task, saved, loaded.payload.get(RESIZED, ()), torch.device("cpu"))
    run.task.load_state_dict(in_memory(saved))
    return run, loaded.entry.step


class _Predicting(nn.Module):
    """A module whose forward is the task's `predict_step`."""

    def __init__(self, task: TaskModule) -> None:
        super().__init__()
        self.task = task

    def forward(self, batch: Any) -> Any:
        """Return the task's predictions."""
        return self.task.predict_step(batch)


def _first_batch(data: Data) -> tuple[Any, int]:
    """Return one batch, and its number of samples."""
    stage = next((stage for stage in _STAGES if data.has(stage)), None)
    if stage is None:
        raise UserError("the run's data has nothing to trace a program with; pass data for predictions.")
    # Any seed will do: the batch is used for its shapes.
    loader = open_loader(data.stage_data(stage), Strategy(device="cpu"), seed=0, limit=1)
    micro_batch = next(iter(loader.batches()))
    return micro_batch.batch, micro_batch.num_samples


def _traced(task: TaskModule, batch: Any, num_samples: int) -> torch.export.ExportedProgram:
    def rows_may_differ(value: Any) -> Any:
        has_rows = isinstance(value, Tensor) and value.dim() > 0 and len(value) == num_samples
        return {0: torch.export.Dim.AUTO} if has_rows else None

    try:
        # Given, since the default of `strict` differs between versions of torch.
        return torch.export.export(
            _Predicting(task.eval()), (batch,), dynamic_shapes=(tree_map(rows_may_differ, batch),), strict=False
        )
    # Tracing raises many types, also those of the user's step.
    except Exception as error:
        first = str(error).strip().partition("\n")[0]
        raise UserError(
            f"{type(task).__name__}.predict_step cannot be traced as a program: {type(error).__name__}: {first} "
            "Remove branches on the values of tensors, or export the weights alone: out=model.safetensors."
        ) from error


# ---- Models of the transformers package


def export_model(settings: Settings, path: Path, out: Path, *, adapter_only: bool) -> str:
    """Write the model of a checkpoint to the folder `out`, as the task's `save_pretrained` does; return a summary."""
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise UserError(f"out={out} exists and is not an empty folder; type another name.")
    run, step = _trained(settings, path)
    if not hasattr(run.task, "save_pretrained"):
        raise UserError(
            f"{type(run.task).__name__} has no method save_pretrained(folder, *, adapter_only); tasks of "
            "trainkit.integrations.huggingface have one. Type out=model.safetensors for the weights of any task."
        )
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        # Beside `out`, so that the rename does not cross file systems.
        with TemporaryDirectory(dir=out.parent, prefix=f".{out.name}.") as made:
            part = Path(made, "model")
            run.task.save_pretrained(part, adapter_only=adapter_only)
            # Replaces an empty folder; a kill before leaves nothing under the final name.
            os.replace(part, out)
    except OSError as error:
        raise UserError(f"{out} cannot be written: {error.strerror or error}.") from error
    what = "adapter" if adapter_only else "model"
    return f"{what} of step {step} in {out}: {', '.join(sorted(file.name for file in out.iterdir()))}"
