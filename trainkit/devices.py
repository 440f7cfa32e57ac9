"""Devices: all that differs between kinds of them. No other module names a kind.

    kind    computes while Python goes on    has streams
    cpu     no                               no
    mps     yes                              no
    cuda    yes                              yes
    xpu     yes                              yes

Work on a device with streams is ordered by its stream alone: what one stream makes another one reads after
`stream.wait_stream` or `event.wait`, and memory that was dropped is used again by its own stream without waiting.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any, NamedTuple
from weakref import finalize

import torch
import torch.distributed as dist
from torch import Tensor

from trainkit.errors import UserError, nearest

OLDEST_TORCH = "2.8"
"""Before, the store of the ranks cannot listen on a socket that is open already."""

_KINDS = ("auto", "cpu", "cuda", "mps")
# Of the driver, cuBLAS, cuDNN and NCCL, whose errors are no OutOfMemoryError.
_OUT_OF_MEMORY = (
    "CUDA error: out of memory",
    "CUBLAS_STATUS_ALLOC_FAILED",
    "CUDNN_STATUS_ALLOC_FAILED",
    "Failed to CUDA calloc",
    "Cuda failure 2",
)


def check_torch() -> None:
    """Raise UserError if the installed torch is not supported."""
    if torch.__version__ < OLDEST_TORCH:  # by numbers: 2.10 is newer
        raise UserError(
            f"trainkit needs torch {OLDEST_TORCH} or newer, and torch {torch.__version__} is installed; type: "
            f"pip install 'torch>={OLDEST_TORCH}'"
        )


# ---- Which device


def pick(name: str) -> torch.device:
    """Return the device called `name` (`auto`: the best one available); raises UserError for one that is missing."""
    kind, accelerator, index = kind_of(name), _accelerator(), str(name).partition(":")[2]
    if kind == "auto":
        return torch.device(accelerator or "cpu")
    if kind == "mps" and accelerator != "mps":
        raise UserError("device 'mps' is not available; set device=cpu.")
    if kind not in ("cpu", "mps"):
        available = count(kind)
        if int(index or 0) >= available:
            raise UserError(
                f"device {name!r} is not available: torch sees {available} {kind.upper()} "
                f"device{'s' * (available != 1)}; set device={f'{kind}:0' if available else 'cpu'}, or install a "
                "torch build for your GPU."
            )
    return torch.device(str(name))


def kind_of(name: str) -> str:
    """Return the kind in the name of a device, of this machine or of another; raises UserError for no such name."""
    kind, _, index = str(name).partition(":")
    if (kind not in _KINDS and kind != _accelerator()) or (index and not index.isdigit()):
        raise UserError(f"unknown device {name!r}.{nearest(kind, _KINDS)} Choose auto, cpu, cuda, cuda:0 or mps.")
    return kind


def _accelerator() -> str | None:
    """Return the kind of the accelerator of this machine, if there is one."""
    device = torch.accelerator.current_accelerator(check_available=True)
    return None if device is None else device.type


def count(kind: str | None = None) -> int:
    """Return the number of devices of a kind that torch sees, by default of the accelerator of this machine."""
    accelerator = _accelerator()
    return torch.accelerator.device_count() if accelerator is not None and kind in (None, accelerator) else 0


def accelerators() -> list[torch.device]:
    """Return all devices but the CPU that torch sees."""
    accelerator = _accelerator()
    return [torch.device(accelerator, index) for index in range(count())] if accelerator else []


def accelerators_in_use() -> list[torch.device]:
    """Return `accelerators()`, and none before this process has used one."""
    devices = accelerators()
    # To ask for a state would initialize CUDA, in a run on the CPU too.
    is_used = all(getattr(_module(device), "is_initialized", lambda: True)() for device in devices[:1])
    return devices if is_used else []


def of_rank(kind: str, local_rank: int) -> torch.device:
    """Return the device of a rank; with gloo, several ranks may share one."""
    return torch.device(kind, local_rank % max(count(kind), 1))


def indexed(device: torch.device) -> torch.device:
    """Return the device with the index that tensors on it have."""
    # `cuda` and `cuda:0` are unequal, so that a tensor on the one would be taken for one that must be moved.
    if has_streams(device) and device.index is None:
        return torch.device(device.type, torch.accelerator.current_device_index())
    return device


def enter(device: torch.device) -> None:
    """Make a device the current one of this thread: streams, events and kernels without a device are of that one."""
    if has_streams(device):
        torch.accelerator.set_device_index(indexed(device))


def name_of(device: torch.device) -> str:
    """Return the name that the maker gave a GPU; of other devices that of torch."""
    return str(_module(device).get_device_name(device)) if has_streams(device) else str(device)


def uuid_of(device: torch.device) -> str:
    """Return what tells a GPU from all others of this machine, whatever index a process sees it under."""
    return str(_module(device).get_device_properties(device).uuid)


def backend_of(kind: str) -> str:
    """Return the backends of process groups: gloo for host memory, and that of the kind of device."""
    # gloo too: objects and flags in host memory are exchanged without waiting for a GPU.
    return "gloo" if kind == "cpu" else f"cpu:gloo,{kind}:{dist.get_default_backend_for_device(kind)}"


def toolkit_versions() -> dict[str, str]:
    """Return the versions of what torch was built with for devices, by name."""
    return {} if torch.version.cuda is None else {"cuda": torch.version.cuda}


# ---- What a device can do


def is_asynchronous(device: torch.device) -> bool:
    """Return True if a device computes while Python goes on, so that a clock shows the launch alone."""
    return device.type != "cpu"


def has_streams(device: torch.device) -> bool:
    """Return True if a device has streams, events, memory counters and memory of its own; False for CPU and MPS."""
    return device.type not in ("cpu", "mps")


def is_cuda(device: torch.device) -> bool:
    """Return True for CUDA alone, for what no other device has: TF32, memory snapshots, registered host memory."""
    return device.type == "cuda"


def widest_float(device: torch.device) -> torch.dtype:
    """Return the widest floating-point type of a device: MPS has no float64."""
    return torch.float32 if device.type == "mps" else torch.float64


def set_tf32(device: torch.device, *, enabled: bool) -> None:
    """Let products of fp32 matrices and convolutions use TF32, or not; nothing on devices other than CUDA."""
    if is_cuda(device):
        torch.set_float32_matmul_precision("high" if enabled else "highest")
        torch.backends.cudnn.allow_tf32 = enabled


# ---- Streams and events


def current_stream(device: torch.device) -> torch.Stream:
    """Return the stream of this thread on a device that has streams."""
    return torch.accelerator.current_stream(device)


def on(device: torch.device, stream: torch.Stream | None = None) -> AbstractContextManager[Any]:
    """Make a device, or a stream of it, the current one of this thread in the block."""
    if not has_streams(device):
        return nullcontext()
    return _module(device).device(device) if stream is None else stream


def end_of(stream: torch.Stream) -> torch.Event:
    """Return the end of the work that a stream has been given so far."""
    return stream.record_event()


def timed_event(device: torch.device) -> torch.Event:
    """Return an event whose `elapsed_time` to another one tells milliseconds, recorded on the current stream."""
    event = torch.Event(device, enable_timing=True)
    event.record(current_stream(device))
    return event


def synchronize(device: torch.device) -> None:
    """Wait until a device has done everything; nothing on the CPU."""
    if is_asynchronous(device):
        torch.accelerator.synchronize(device)


def profiled_by(device: torch.device) -> list[Any]:
    """Return the activities of `torch.profiler` that record a device, beside that of the CPU."""
    from torch.profiler import ProfilerActivity

    return [ProfilerActivity[device.type.upper()]] if has_streams(device) else []


# ---- Copies


def pin(tensor: Tensor) -> Tensor:
    """Return a copy of a tensor in pinned host memory, from which copies do not wait; of a GPU the tensor itself."""
    return tensor if tensor.device.type != "cpu" or tensor.is_pinned() else tensor.pin_memory()


def pin_in_place(tensor: Tensor) -> Callable[[], object] | None:
    """Pin existing host memory until it is dropped; return what undoes it before. Nothing without CUDA, or if empty.

    torch's own pinned memory is rounded up to a power of two, and kept by torch when it is dropped.
    """
    if not tensor.nbytes or not torch.cuda.is_available():
        return None
    torch.cuda.check_error(torch.cuda.cudart().cudaHostRegister(tensor.data_ptr(), tensor.nbytes, 0))
    undo = finalize(tensor, torch.cuda.cudart().cudaHostUnregister, tensor.data_ptr())
    undo.atexit = False  # the driver may have ended
    return undo


# ---- Memory


class DeviceMemory(NamedTuple):
    """Memory of a device, in bytes."""

    peak: int
    """The most that tensors have taken since the last `reset_peak`."""
    used: int
    """What tensors take now."""
    free: int
    """What further tensors can take."""
    reserved: int = 0
    """What torch has taken from the device, for tensors and for reuse."""


def memory(device: torch.device) -> DeviceMemory:
    """Return the memory of a device with streams."""
    module = _module(device)
    used, reserved = module.memory_allocated(device), module.memory_reserved(device)
    # What torch has reserved and does not use is free for further tensors, though the device counts it as used. Parts
    # of blocks that are in use are not: a large tensor fits into none of them.
    fragments = module.memory_stats(device).get("inactive_split_bytes.all.current", 0)
    free = module.mem_get_info(device)[0] + reserved - used - fragments
    return DeviceMemory(module.max_memory_allocated(device), used, free, reserved)


def peak_memory(device: torch.device) -> int:
    """Return the bytes that tensors have taken at most since the last `reset_peak`."""
    return int(_module(device).max_memory_allocated(device))


def reset_peak(device: torch.device) -> None:
    """Begin a new peak."""
    _module(device).reset_peak_memory_stats(device)


def free_cached(device: torch.device) -> None:
    """Give memory that no tensor uses back to the device: blocks of one size may not serve another."""
    if has_streams(device):
        _module(device).empty_cache()


def is_out_of_memory(error: BaseException) -> bool:
    """Return True for an error of too little memory: torch's own, and those of the libraries below it."""
    if isinstance(error, torch.OutOfMemoryError):
        return True
    return isinstance(error, RuntimeError) and any(text in str(error) for text in _OUT_OF_MEMORY)


def record_memory_history(*, enabled: bool) -> None:
    """Begin or end to record what each block of CUDA memory was taken for, the oldest entries first to go."""
    # Private: torch documents these functions for memory_viz, and has no public names.
    if enabled:
        torch.cuda.memory._record_memory_history(max_entries=100_000)
    else:
        torch.cuda.memory._record_memory_history(enabled=None)


def write_memory_history(path: Path) -> None:
    """Write what was recorded, for memory_viz."""
    torch.cuda.memory._dump_snapshot(str(path))


def memory_summary(device: torch.device) -> str:
    """Return torch's table of the memory of a device; empty for devices other than CUDA."""
    return torch.cuda.memory_summary(device) if is_cuda(device) else ""


# ---- Random numbers


def generator_state(device: torch.device) -> Tensor | None:
    """Return the state of a device's generator, a tensor in host memory; `None` for the CPU."""
    if device.type == "cpu":
        return None
    state: Tensor = _module(device).get_rng_state() if device.type == "mps" else _module(device).get_rng_state(device)
    return state


def set_generator_state(device: torch.device, state: Tensor) -> None:
    """Restore what `generator_state` returned."""
    if device.type == "mps":
        _module(device).set_rng_state(state)
    else:
        _module(device).set_rng_state(state, device)


def seed_device(device: torch.device, number: int) -> None:
    """Seed the generator of a device; nothing on the CPU."""
    if device.type == "cpu":
        return
    with on(device):
        _module(device).manual_seed(number)


def _module(device: torch.device) -> Any:
    return torch.get_device_module(device)
