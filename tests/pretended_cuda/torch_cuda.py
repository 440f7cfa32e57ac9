"""Puts the pretended device behind `torch.cuda` and `torch.distributed`: what a CPU build of torch lacks."""

from __future__ import annotations

import atexit
import importlib
import os
import sys
import types
import uuid
from datetime import timedelta
from typing import Any

import torch

import pretended_cuda as device  # the library, which is loaded before torch

POLICIES = ("in_order", "late", "side_first", "random")
CUDA = 1  # c10::DeviceType


def install(devices: int, policy: str = "late", seed: int = 0) -> None:
    """Let torch see this number of devices; called once, after the import of torch."""
    device.set_devices(devices)
    device.set_policy(POLICIES.index(policy), seed)
    _add_private_functions()
    _add_to_torch_cuda()
    _add_to_storages()
    if torch.distributed.is_available():
        _add_nccl()
    # Threads of queues must not look for the GIL of an interpreter that has ended.
    atexit.register(lambda: None if device.is_forked() else device.synchronize(-1))


def set_policy(policy: str, seed: int = 0) -> None:
    """Run queues in another way from now on; ends what is queued."""
    device.set_policy(POLICIES.index(policy), seed)


def syncs() -> int:
    """Return how often the host has waited for a device."""
    return int(device.syncs())


class _StreamBase(torch.Stream):
    def __new__(cls, priority: int = 0, **place: Any) -> Any:
        if not place:
            place = {"stream_id": device.new_stream(), "device_index": device.current_device()}
        return super().__new__(cls, stream_id=place["stream_id"], device_index=place["device_index"], device_type=CUDA)

    @property
    def cuda_stream(self) -> int:
        return self.stream_id


class _EventBase(torch.Event):
    def __new__(cls, enable_timing: bool = False, blocking: bool = False, interprocess: bool = False, **_: Any) -> Any:
        return super().__new__(cls, device="cuda", enable_timing=enable_timing)

    @property
    def cuda_event(self) -> int:
        return self.event_id

    def elapsed_time(self, end: Any) -> float:
        return device.elapsed_time(self.event_id, end.event_id)  # torch.Event's takes no subclass


class _Cudart:
    """What torch and trainkit call of CUDA's runtime library."""

    class cudaError(int):
        success = 0

    def cudaHostRegister(self, pointer: int, size: int, flags: int) -> int:
        device.pin(pointer, size)
        return 0

    def cudaHostUnregister(self, pointer: int) -> int:
        device.unpin(pointer)
        return 0

    def cudaMemGetInfo(self, index: int) -> tuple[int, int]:
        return device.memory_info(index)

    def cudaGetErrorString(self, error: int) -> str:
        return f"error {error}"


def _add_private_functions() -> None:
    """Give `torch._C` what the functions of `torch.cuda` call, so that these are torch's own."""

    def exchange(index: int) -> int:
        before = device.current_device()
        if index >= 0:
            device.set_device(index)
        return before

    def stream_of(index: int, stream: int) -> tuple[int, int, int]:
        return stream, device.current_device() if index < 0 else index, CUDA

    functions = {
        "init": lambda: None,
        "getDeviceCount": device.device_count,
        "getDevice": device.current_device,
        "setDevice": device.set_device,
        "exchangeDevice": exchange,
        "maybeExchangeDevice": lambda index: exchange(int(index)),  # not the same function: the compiler lists both
        "isInBadFork": device.is_forked,
        "synchronize": lambda: device.synchronize(device.current_device()),
        "getCurrentStream": lambda index: stream_of(index, device.current_stream(index)),
        "getDefaultStream": lambda index: stream_of(index, 0),
        "setStream": lambda stream_id, device_index, device_type: device.set_stream(device_index, stream_id),
        "getCurrentRawStream": device.current_stream,
        "isCurrentStreamCapturing": lambda: False,
        "set_sync_debug_mode": device.set_sync_mode,
        "get_sync_debug_mode": device.sync_mode,
        "emptyCache": device.empty_cache,
        "memoryStats": _memory_stats,
        "resetPeakMemoryStats": device.reset_peak,
        "resetAccumulatedMemoryStats": lambda index: None,
        "record_memory_history": lambda *_, **__: None,
        "memorySnapshot": lambda *_: {"segments": [], "device_traces": [], "allocator_settings": {}},
        "getAllocatorBackend": lambda: "native",
        "canDeviceAccessPeer": lambda first, second: True,
        "ipc_collect": lambda: None,
        "sleep": lambda cycles: device.queue_nothing(),
        "getArchFlags": lambda: "",
    }
    for name, function in functions.items():
        setattr(torch._C, f"_cuda_{name}", function)
    torch._C._CudaStreamBase, torch._C._CudaEventBase = _StreamBase, _EventBase
    torch._C._cuda_record_memory_history_legacy = lambda *_, **__: None


def _memory_stats(index: int) -> dict[str, Any]:
    return {name: {"all": stat} for name, stat in device.memory(index).items()}


def _properties(index: Any = None) -> types.SimpleNamespace:
    index = torch.cuda._utils._get_device_index(index, optional=True)
    if not 0 <= index < device.device_count():
        raise AssertionError("Invalid device id")
    return types.SimpleNamespace(
        name="pretended",
        uuid=uuid.UUID(int=index + 1),
        total_memory=device.memory_info(index)[1],
        major=9,
        minor=0,
        multi_processor_count=1,
    )


def _add_to_torch_cuda() -> None:
    torch.backends.cuda.is_built = lambda: True
    torch.backends.cudnn.is_acceptable = lambda tensor: False
    streams = importlib.reload(torch.cuda.streams)  # its classes have the bases of now
    values = {
        **{name: getattr(streams, name) for name in ("Stream", "Event", "ExternalStream")},
        "_cudart": _Cudart(),
        "_initialized": True,
        "_is_in_bad_fork": device.is_forked,
        "_exchange_device": torch._C._cuda_exchangeDevice,
        "_maybe_exchange_device": torch._C._cuda_maybeExchangeDevice,
        "is_available": lambda: device.device_count() > 0,
        "device_count": device.device_count,
        "get_device_properties": _properties,
        "is_current_stream_capturing": lambda: False,
        "default_generators": tuple(_default_generator(index) for index in range(device.device_count())),
    }
    for name, value in values.items():
        setattr(torch.cuda, name, value)
    sys.modules["torch.cuda.graphs"].is_current_stream_capturing = lambda: False
    torch.cuda.memory.is_initialized = lambda: True

    def cuda(tensor: Any, device: Any = None, non_blocking: bool = False, **settings: Any) -> Any:
        index = torch.cuda._utils._get_device_index(device, optional=True)
        return tensor.to(torch.device("cuda", index), non_blocking=non_blocking, **settings)

    torch.Tensor.cuda = cuda


def _default_generator(index: int) -> torch.Generator:
    return device.default_generator(index)


def _add_to_storages() -> None:
    resize = torch.UntypedStorage.resize_

    def resize_(storage: Any, size: int) -> Any:
        if storage.device.type != "cuda":
            return resize(storage, size)
        whole = torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
        device.resize_storage(whole, size)
        return storage

    make = torch.UntypedStorage.__new__

    def new(cls: Any, *sizes: Any, **settings: Any) -> Any:
        on = settings.get("device")
        if on is None or torch.device(on).type != "cuda":
            return make(cls, *sizes, **settings)
        return torch.empty(sizes[0] if sizes else 0, dtype=torch.uint8, device=on).untyped_storage()

    torch.UntypedStorage.resize_, torch.UntypedStorage.__new__ = resize_, new


def _add_nccl() -> None:
    """Take the pretended communicator for nccl, and for gloo with tensors on the device."""
    c10d = importlib.import_module("torch.distributed.distributed_c10d")
    device.bind_communicator()
    device.set_limit_seconds(float(os.environ.get("TRAINKIT_PRETENDED_NCCL_SECONDS", "60")))
    gloo = c10d.ProcessGroupGloo

    class Options:
        def __init__(self, is_high_priority_stream: bool = False) -> None:
            self.is_high_priority_stream, self._timeout = is_high_priority_stream, timedelta(minutes=10)
            self.global_ranks_in_group: list[int] = []
            self.group_name = ""

    class OfDevice(type(device.Communicator)):  # type: ignore[misc]
        """Made as torch makes nccl's group; what it makes is a communicator, which Python may see again as one."""

        def __call__(cls, store: Any, rank: int, size: int, options: Any) -> Any:
            own = gloo(c10d.PrefixStore("gloo", store), rank, size, timeout=options._timeout)
            return device.Communicator(store, own, "nccl", options.group_name)

        def __instancecheck__(cls, instance: Any) -> bool:
            return isinstance(instance, device.Communicator) and instance.name() == "nccl"

    nccl: Any = OfDevice("ProcessGroupNCCL", (object,), {"Options": Options})
    c10d.ProcessGroupNCCL = torch.distributed.ProcessGroupNCCL = nccl
    c10d._NCCL_AVAILABLE = True
    c10d.default_pg_nccl_timeout = timedelta(minutes=10)
    register = c10d.ProcessGroup._register_backend

    def register_backend(group: Any, of: torch.device, kind: Any, backend: Any = None) -> None:
        if of.type == "cuda" and isinstance(backend, gloo):
            backend, kind = (
                device.Communicator(torch.distributed.HashStore(), backend, "gloo", ""),
                c10d.ProcessGroup.BackendType.CUSTOM,
            )
        register(group, of, kind, backend)

    c10d.ProcessGroup._register_backend = register_backend
