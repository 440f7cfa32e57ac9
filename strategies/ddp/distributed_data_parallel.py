"""DistributedDataParallel: a drop-in for PyTorch's class of the same name, over the Reducer of this package."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar, get_origin, get_type_hints

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import GradBucket as TorchGradBucket  # type: ignore[attr-defined] # torch exports it at run time
from torch.distributed.algorithms.join import Join, Joinable, JoinHook
from torch.distributed.constants import default_pg_timeout
from torch.distributed.device_mesh import DeviceMesh

from trainkit.distributed.collectives import broadcast
from trainkit.tree import tensors_in, to_device

from .bucket import GradBucket
from .reducer import Reducer, ReducerSettings
from .transport import CommunicationHook, HookFuture, TransportName

_INSTEAD = {
    "mixed_precision": "compute in torch.autocast, which keeps parameters and gradients in full precision",
    "delay_all_reduce_named_params": "omit it: a bucket is reduced as soon as its gradients are ready",
    "param_to_hook_all_reduce": "omit it: a bucket is reduced as soon as its gradients are ready",
    "bucket_cap_mb_list": "give one size for all buckets, bucket_cap_mb",
    "skip_all_reduce_unused_params": "give find_unused_parameters=True: a parameter that no rank uses costs one flag",
}
HIDING_NODE = "CheckpointFunctionBackward"

F = TypeVar("F", bound=Callable[..., Any])


def _not_compiled(function: F) -> F:
    """Exclude `function` from `torch.compile`; `torch.compiler.disable` would import the compiler."""
    function._torchdynamo_disable = True  # type: ignore[attr-defined] # functions have no declared attributes
    return function


class DistributedDataParallel(nn.Module, Joinable):
    """Averages gradients over the ranks of a process group during backward, with PyTorch's interface.

    Differences that a program can see: every backward is reduced, also the second of two forwards or of a retained
    graph; a parameter without a gradient is named in the same backward; ranks of one host use shared memory.

    Args:
        module: The model; its parameters and buffers become those of rank 0.
        device_ids: The one device of this rank, to which inputs are moved; `None` for a CPU, or to not move them.
        output_device: Ignored; outputs stay on the module's device.
        dim: Ignored.
        broadcast_buffers: The older name of `forward_sync_buffers`; `False` also skips buffers at construction.
        init_sync: Compare frozen parameters and buffers as well at construction, and broadcast all from rank 0.
        process_group: The ranks; `None`: all ranks.
        bucket_cap_mb: Size of a bucket in MiB.
        find_unused_parameters: Allow parameters that take no part in the loss.
        gradient_as_bucket_view: Make `.grad` a view of a bucket: less memory and no copy.
        static_graph: Every step uses the same parameters equally often.
        device_mesh: The ranks as a mesh of one dimension, instead of `process_group`.
        forward_sync_buffers: Broadcast rank 0's buffers before the first forward, with or without gradients, that
            follows one whose backward is reduced.
        check_reduction: Ignored.
        batched_grad_copy: Ignored: gradients that are copied are copied together.
        mixed_precision: Rejected, as the four that follow; the error names what to use instead.
        delay_all_reduce_named_params: Rejected.
        param_to_hook_all_reduce: Rejected.
        bucket_cap_mb_list: Rejected.
        skip_all_reduce_unused_params: Rejected.
        transport: "auto", "shared_memory" or "process_group".

    """

    def __init__(  # noqa: PLR0917 - the order is PyTorch's own
        self,
        module: nn.Module,
        device_ids: Sequence[int | torch.device] | None = None,
        output_device: int | torch.device | None = None,
        dim: int = 0,
        broadcast_buffers: bool | None = None,
        init_sync: bool = True,
        process_group: dist.ProcessGroup | None = None,
        bucket_cap_mb: float | None = None,
        find_unused_parameters: bool = False,
        gradient_as_bucket_view: bool = False,
        static_graph: bool = False,
        *,
        device_mesh: DeviceMesh | None = None,
        forward_sync_buffers: bool | None = None,
        check_reduction: bool = False,
        batched_grad_copy: bool = False,
        mixed_precision: object = None,
        delay_all_reduce_named_params: object = None,
        param_to_hook_all_reduce: object = None,
        bucket_cap_mb_list: Sequence[float] | None = None,
        skip_all_reduce_unused_params: bool = False,
        transport: TransportName = "auto",
    ) -> None:
        nn.Module.__init__(self)
        Joinable.__init__(self)
        _refuse(
            mixed_precision=mixed_precision,
            delay_all_reduce_named_params=delay_all_reduce_named_params,
            param_to_hook_all_reduce=param_to_hook_all_reduce,
            bucket_cap_mb_list=bucket_cap_mb_list,
            skip_all_reduce_unused_params=skip_all_reduce_unused_params,
        )
        if bucket_cap_mb is not None and bucket_cap_mb <= 0:
            raise ValueError(f"bucket_cap_mb must be above 0, got {bucket_cap_mb}")
        self.process_group = _process_group(process_group, device_mesh)
        ignored = getattr(module, "_ddp_params_and_buffers_to_ignore", ())
        self.parameters_to_ignore = set(ignored)
        self._device = _check_devices(module, device_ids, self.parameters_to_ignore)
        self.module = module
        self.device_ids = None if device_ids is None else [torch.device(self._device)]
        self.output_device = output_device
        self.dim = dim
        self.device_mesh = device_mesh
        self.forward_sync_buffers = broadcast_buffers is not False
        if forward_sync_buffers is not None:
            self.forward_sync_buffers = forward_sync_buffers
        self.find_unused_parameters = find_unused_parameters
        self.gradient_as_bucket_view = gradient_as_bucket_view
        self.static_graph = static_graph
        self.bucket_cap_mb = bucket_cap_mb
        self.transport: TransportName = transport
        self._divide_by_initial_world_size = True
        self.buffers_may_differ = True  # from rank 0's
        if not init_sync:
            self._make_reducer()
            return
        skips_buffers = broadcast_buffers is False and forward_sync_buffers is None
        frozen = [(name, parameter) for name, parameter in self._named_parameters() if not parameter.requires_grad]
        buffers = [] if skips_buffers else self._named_buffers()
        self._make_reducer(untrained={"frozen parameter": frozen, "buffer": buffers})
        broadcast([*self.synced_parameters(), *(buffer for _, buffer in buffers)], self.process_group)

    # ---- Forward

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """Return the module's outputs; their backward averages gradients, unless in `no_sync`."""
        inputs, kwargs = self._before_forward(inputs, kwargs)
        outputs = self.module(*inputs, **kwargs)
        self._after_forward(outputs)
        return outputs

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Only accumulate gradients on this rank; the first backward after it averages the sums."""
        with self.reducer.no_sync():
            yield

    @property
    def require_backward_grad_sync(self) -> bool:
        """True if a backward is averaged over ranks."""
        return self.reducer.sync

    @require_backward_grad_sync.setter
    def require_backward_grad_sync(self, sync: bool) -> None:
        self.reducer.sync = sync

    @property
    def broadcast_buffers(self) -> bool:
        """The older name of `forward_sync_buffers`."""
        return self.forward_sync_buffers

    @broadcast_buffers.setter
    def broadcast_buffers(self, broadcast_buffers: bool) -> None:
        self.forward_sync_buffers = broadcast_buffers

    def register_comm_hook(self, state: object, hook: CommunicationHook) -> None:
        """Reduce the buckets by `hook(state, bucket)`, which returns a future of the reduced tensor."""
        _check_hook(hook)
        self.reducer.register_hook(state, hook)

    @_not_compiled
    def _before_forward(self, inputs: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        reducer = self.reducer
        trains = torch.is_grad_enabled()
        if trains:
            if reducer.is_open and torch._C._current_graph_task_id() == -1:
                reducer.abort()  # the last backward ended by an exception
            if self._join_config.enable:
                self._notify_joined_ranks()
        # As in PyTorch an evaluation begins with equal buffers too; joined ranks only know of reduced forwards.
        is_due = trains and reducer.sync if self._join_config.enable else self.buffers_may_differ
        if self.forward_sync_buffers and is_due:
            self.sync_buffers(candidate=self.process_group.rank())
        self.buffers_may_differ = trains and reducer.sync
        if self.device_ids is None:
            return inputs, kwargs
        return to_device(inputs, self._device), to_device(kwargs, self._device)

    @_not_compiled
    def _after_forward(self, outputs: Any) -> None:
        if not torch.is_grad_enabled() or not self.reducer.sync:
            return
        tensors = [tensor for tensor in tensors_in(outputs) if tensor.requires_grad]
        unused: list[int] = []
        if self.find_unused_parameters and not self.static_graph:
            unused = unreached_parameters(tensors, self.reducer.parameters)
        reducer = self.reducer

        def start(gradient: Tensor) -> None:
            reducer.start_on_hook(unused)

        # The outermost backward reaches the outputs first. A parameter's own hook might run in the inner
        # backward of a reentrant checkpoint, which ends too early.
        for tensor in tensors:
            tensor.register_hook(start)

    def sync_buffers(self, *, candidate: int) -> None:
        """Broadcast the buffers of rank 0, or in `join` of the highest `candidate` of any rank. Collective."""
        buffers = self.synced_buffers()
        if buffers:
            source = self.common_rank(candidate) if self._join_config.enable else 0
            broadcast(buffers, self.process_group, source=source)

    # ---- Uneven inputs

    def join(
        self,
        divide_by_initial_world_size: bool = True,
        enable: bool = True,
        throw_on_early_termination: bool = False,
    ) -> Join:
        """Return a context in which ranks may have unequal numbers of batches: ranks without one add zeros."""
        return Join(
            [self],
            enable,
            throw_on_early_termination,
            divide_by_initial_world_size=divide_by_initial_world_size,
        )

    def join_hook(self, **kwargs: Any) -> JoinHook:
        """Return the hook that runs instead of forwards and backwards once this rank has no more batches."""
        self._divide_by_initial_world_size = kwargs.get("divide_by_initial_world_size", True)
        return DDPJoinHook(self)

    @property
    def join_device(self) -> torch.device:
        """The device of the collectives that `Join` needs."""
        return self._device

    @property
    def join_process_group(self) -> dist.ProcessGroup:
        """The ranks that may join."""
        return self.process_group

    def _notify_joined_ranks(self) -> None:
        """Announce a forward to ranks without batches, and whether its backward is reduced. Collective."""
        work = Join.notify_join_context(self)
        if work is not None:
            work.wait()
        counts = torch.tensor([float(self.reducer.sync), 1.0], device=self._device)
        dist.all_reduce(counts, group=self.process_group)
        active = self.process_group.size() if self._divide_by_initial_world_size else max(1, int(counts[1].item()))
        self.reducer.set_divisor(active)

    def common_rank(self, candidate: int) -> int:
        """Return the highest rank that any rank proposes (-1: none). Collective."""
        rank = torch.tensor([candidate], device=self._device)
        dist.all_reduce(rank, dist.ReduceOp.MAX, group=self.process_group)
        return int(rank.item())

    # ---- State

    def __getstate__(self) -> dict[str, Any]:
        state = self.__dict__.copy()
        for name in ("process_group", "reducer", "_closing"):
            del state[name]
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # type: ignore[no-untyped-call] # nn.Module's own
        self.process_group = _default_group()  # process groups cannot be pickled
        self._make_reducer()

    def _make_reducer(self, *, untrained: Mapping[str, Sequence[tuple[str, Tensor]]] | None = None) -> None:
        named = [(name, parameter) for name, parameter in self._named_parameters() if parameter.requires_grad]
        if not named:
            raise RuntimeError(
                "DistributedDataParallel is not needed when a module has no parameter that requires a gradient."
            )
        settings = ReducerSettings(
            bucket_cap_mb=self.bucket_cap_mb,
            gradient_as_bucket_view=self.gradient_as_bucket_view,
            find_unused_parameters=(
                "graph" if self.find_unused_parameters else "auto" if self.static_graph else "error"
            ),
            static_graph=self.static_graph,
            transport=self.transport,
            timeout_seconds=_timeout_seconds(self.process_group, self._device),
        )
        self.reducer = Reducer(named, group=self.process_group, settings=settings, untrained=untrained)
        # Parameters outlive this wrapper, and their hooks hold the Reducer: without it they would wait for ranks.
        self._closing = weakref.finalize(self, self.reducer.close)
        self._closing.atexit = False

    def synced_parameters(self) -> list[Tensor]:
        """Return the parameters that are equal on all ranks: all that are not ignored."""
        return [parameter for _, parameter in self._named_parameters()]

    def synced_buffers(self) -> list[Tensor]:
        """Return the buffers that are equal on all ranks: all that are not ignored."""
        return [buffer for _, buffer in self._named_buffers()]

    def _named_parameters(self) -> list[tuple[str, nn.Parameter]]:
        named = self.module.named_parameters()
        return [(name, parameter) for name, parameter in named if name not in self.parameters_to_ignore]

    def _named_buffers(self) -> list[tuple[str, Tensor]]:
        named = self.module.named_buffers()
        return [(name, buffer) for name, buffer in named if name not in self.parameters_to_ignore]

    # ---- Private methods of PyTorch's class that programs use

    @staticmethod
    def _set_params_and_buffers_to_ignore_for_model(module: nn.Module, names: Iterable[str]) -> None:
        """Ignore the parameters and buffers called `names` in wrappers that are made of `module` later."""
        module._ddp_params_and_buffers_to_ignore = set(names)  # type: ignore[assignment] # PyTorch's attribute

    def _set_static_graph(self) -> None:
        """Switch to `static_graph=True`; collective."""
        if self.reducer.step:
            raise RuntimeError("_set_static_graph() should be called before training loop starts")
        if not self.static_graph:
            self.static_graph = True
            self._closing()
            self._make_reducer()

    def _remove_autograd_hooks(self) -> None:
        """Remove the hooks on parameters."""
        self._closing()


class DDPJoinHook(JoinHook):
    """Shadows the forwards and backwards of the other ranks on a rank that has run out of batches."""

    def __init__(self, wrapper: DistributedDataParallel) -> None:
        self.wrapper = wrapper

    def main_hook(self) -> None:
        """Take part in each collective of the others' forward and backward, with zeros as gradients."""
        wrapper = self.wrapper
        counts = torch.zeros(2, device=wrapper.join_device)  # ranks that will reduce, ranks with a batch
        dist.all_reduce(counts, group=wrapper.process_group)
        if not counts[0].item():
            return
        if wrapper.forward_sync_buffers:
            wrapper.sync_buffers(candidate=-1)
        with _preserved_gradients(wrapper.reducer.parameters):
            wrapper.reducer.reduce_zeros()

    def post_hook(self, is_last_joiner: bool) -> None:
        """Leave on every rank the state of one that had batches to the end."""
        wrapper = self.wrapper
        source = wrapper.common_rank(wrapper.process_group.rank() if is_last_joiner else -1)
        broadcast([*wrapper.synced_parameters(), *wrapper.synced_buffers()], wrapper.process_group, source=source)
        wrapper.buffers_may_differ = True  # on all ranks, so that their next forwards have the same collectives


@contextmanager
def _preserved_gradients(parameters: Sequence[nn.Parameter]) -> Iterator[None]:
    """Restore the gradients on exit: this rank will not zero those of the others."""
    before = [None if parameter.grad is None else parameter.grad.clone() for parameter in parameters]
    try:
        yield
    finally:
        for parameter, gradient in zip(parameters, before, strict=True):
            parameter.grad = gradient


def unreached_parameters(outputs: Iterable[Tensor], parameters: Iterable[nn.Parameter]) -> list[int]:
    """Return the indices of parameters that get no gradient from `outputs`, found by a walk over the autograd graph.

    Empty with a reentrant checkpoint, which hides the graph behind it.
    """
    reached: set[int] = set()
    seen: set[Any] = set()
    waiting: list[Any] = []
    for output in outputs:
        if output.grad_fn is not None:
            waiting.append(output.grad_fn)
        elif output.requires_grad:
            reached.add(id(output))  # a parameter that is itself an output
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if node.name() == HIDING_NODE:
            return []
        variable = getattr(node, "variable", None)  # on AccumulateGrad nodes only
        if variable is not None:
            reached.add(id(variable))
        waiting.extend(parent for parent, _ in node.next_functions)
    return [index for index, parameter in enumerate(parameters) if id(parameter) not in reached]


def _process_group(process_group: dist.ProcessGroup | None, device_mesh: DeviceMesh | None) -> dist.ProcessGroup:
    """Return the process group of the two arguments; by default the group of all ranks."""
    if device_mesh is None:
        return process_group if process_group is not None else _default_group()
    if process_group is not None:
        raise RuntimeError("Cannot specify both process_group and device_mesh arguments. They name the same ranks.")
    if device_mesh.ndim != 1:
        raise RuntimeError(f"Only 1D device mesh is supported, got {device_mesh}; give the dimension of the replicas.")
    return device_mesh.get_group(0)


def _refuse(**arguments: object) -> None:
    """Raise ValueError for arguments that are given; the message names what to use instead."""
    for name, value in arguments.items():
        if value is not None and value is not False:
            raise ValueError(f"{name} is not supported here; {_INSTEAD[name]}, or use PyTorch's own class.")


def _default_group() -> dist.ProcessGroup:
    """Return the default process group; raise RuntimeError if it is not initialized."""
    if not dist.is_initialized():
        raise RuntimeError(
            "the default process group is not initialized; call torch.distributed.init_process_group first"
        )
    group = dist.group.WORLD
    assert group is not None
    return group


def _timeout_seconds(group: dist.ProcessGroup, device: torch.device) -> float:
    """Return the timeout of `group` in seconds; torch's default if the backend does not offer it."""
    try:
        limit = group._get_backend(device).options._timeout
    except (AttributeError, RuntimeError):  # not every backend has options
        limit = default_pg_timeout
    return float(limit.total_seconds())


def _check_hook(hook: Callable[..., Any]) -> None:
    """Raise TypeError for a communication hook that is not callable, ValueError for other types in its signature."""
    if not callable(hook):
        raise TypeError("Communication hook must be callable.")
    try:
        hints = get_type_hints(hook)
    except Exception:  # names that do not exist at run time
        hints = {}
    bucket, returned = hints.get("bucket", Any), hints.get("return", Any)
    if bucket not in (TorchGradBucket, GradBucket, Any):
        raise ValueError(f"Communication hook: bucket annotation should be dist.GradBucket, not {bucket}.")
    if returned not in (HookFuture, Any) and get_origin(returned) not in (Generator, Iterator):
        raise ValueError(
            f"Communication hook: return annotation should be torch.futures.Future[torch.Tensor], not {returned}."
        )


def _check_devices(
    module: nn.Module, device_ids: Sequence[int | torch.device] | None, ignored: set[str]
) -> torch.device:
    """Return the device of the parameters; raise for several types of device, or for wrong `device_ids`."""
    devices = {p.device for name, p in module.named_parameters() if name not in ignored and p.requires_grad}
    if not devices:
        raise RuntimeError(
            "DistributedDataParallel is not needed when a module has no parameter that requires a gradient."
        )
    if len({device.type for device in devices}) != 1:
        raise ValueError(f"the module's parameters must be on one kind of device, but are on {devices}")
    device = min(devices, key=str)
    if device_ids is not None:
        if len(device_ids) > 1:
            raise ValueError(f"device_ids must be None or name one device, got {list(device_ids)}")
        if device_ids and device.type == "cpu":
            raise ValueError(f"device_ids must be None for a module on the CPU, got {list(device_ids)}")
    return device
