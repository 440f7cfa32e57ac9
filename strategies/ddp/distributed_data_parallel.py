"""DistributedDataParallel: a drop-in for PyTorch's class of the same name, over the Reducer of this package."""

from __future__ import annotations

import os
import time
import weakref
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any, NoReturn, TypeVar, get_origin, get_type_hints

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd import _unsafe_preserve_version_counter  # type: ignore[attr-defined] # torch exports it at run time
from torch.distributed import BuiltinCommHookType  # type: ignore[attr-defined] # as above
from torch.distributed import GradBucket as TorchGradBucket  # type: ignore[attr-defined] # as above
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.algorithms.join import Join, Joinable, JoinHook
from torch.distributed.constants import default_pg_timeout
from torch.distributed.device_mesh import DeviceMesh
from torch.nn import parallel
from torch.nn.parallel.distributed import _BufferCommHookLocation

from trainkit.distributed.collectives import broadcast
from trainkit.task import count_registrations
from trainkit.tree import tensors_in, to_device

from ..reducer.bucket import GradBucket
from ..reducer.bucket_plan import DEFAULT_CAP_BYTES, MIB
from ..reducer.bucket_recorder import Timeline, logging_times
from ..reducer.reducer import Reducer, ReducerSettings
from ..reducer.unused_parameters import unreached_parameters
from ..transports.process_group import CommunicationHook, HookFuture, TransportName
from ..transports.selection import open_transport

_INSTEAD = {
    "mixed_precision": "compute in torch.autocast, which keeps parameters and gradients in full precision",
    "delay_all_reduce_named_params": "omit it: a bucket is reduced as soon as its gradients are ready",
    "param_to_hook_all_reduce": "omit it: a bucket is reduced as soon as its gradients are ready",
    "_set_sparse_metadata": "omit it: sparse gradients are reduced as sparse tensors",
    "_update_process_group": "wrap the module again, with the new process group",
    "skip_all_reduce_unused_params": "give find_unused_parameters=True: a parameter that no rank uses costs one flag",
}
# PyTorch runs these two in C++, for its own Reducer only; its hooks in Python reduce the same.
_BUILTIN_HOOKS = {
    BuiltinCommHookType.ALLREDUCE: default_hooks.allreduce_hook,
    BuiltinCommHookType.FP16_COMPRESS: default_hooks.fp16_compress_hook,
}
_LOGGED_VARIABLES = ("MASTER_ADDR", "MASTER_PORT", "TORCH_DISTRIBUTED_DEBUG", "CUDA_VISIBLE_DEVICES")
_LOGGED_VARIABLES_OF_GLOO = ("GLOO_SOCKET_IFNAME", "GLOO_DEVICE_TRANSPORT")
# Of these some hold sockets, threads or weak references, and ids are others in the process that unpickles.
_NOT_PICKLED = (
    "process_group",
    "reducer",
    "timeline",
    "_parameters_at_start",
    "_module_ids",
    "_registrations",
    "_closing",
)
SAMPLED_STEPS = 10  # at the start; from then on one in `_set_ddp_runtime_logging_sample_rate`

F = TypeVar("F", bound=Callable[..., Any])


def _not_compiled(function: F) -> F:
    """Exclude `function` from `torch.compile`; `torch.compiler.disable` would import the compiler."""
    # Private: the attribute that the decorator of torch sets, too.
    function._torchdynamo_disable = True  # type: ignore[attr-defined] # functions have no declared attributes
    return function


class DistributedDataParallel(parallel.DistributedDataParallel):
    """Averages gradients over the ranks of a process group during backward, with PyTorch's interface.

    A subclass of PyTorch's class, for `isinstance`. Differences that a program can see: every backward of a forward of
    the wrapper is reduced, also the second of two forwards or of a retained graph; a parameter without a gradient is
    named in the same backward; ranks of one host use shared memory.

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
        bucket_cap_mb_list: Sizes of the first buckets in MiB, in order of reduction; the last is that of all others.
        mixed_precision: Rejected, as `delay_all_reduce_named_params`, `param_to_hook_all_reduce` and
            `skip_all_reduce_unused_params`; the error names what to use instead.
        transport: "auto", "shared_memory" or "process_group".

    """

    reducer: Reducer  # type: ignore[assignment] # of this package, not PyTorch's

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
        nn.Module.__init__(self)  # not PyTorch's constructor, which would make a second Reducer
        Joinable.__init__(self)
        _refuse(
            mixed_precision=mixed_precision,
            delay_all_reduce_named_params=delay_all_reduce_named_params,
            param_to_hook_all_reduce=param_to_hook_all_reduce,
            skip_all_reduce_unused_params=skip_all_reduce_unused_params,
        )
        caps = tuple(bucket_cap_mb_list or ())
        for name, cap in [("bucket_cap_mb", bucket_cap_mb), *(("bucket_cap_mb_list", cap) for cap in caps)]:
            if cap is not None and cap <= 0:
                raise ValueError(f"{name} must be above 0, got {cap}")
        self.process_group = _process_group(process_group, device_mesh)
        # Private: PyTorch's only way to leave tensors out, which programs set on their module.
        self.parameters_to_ignore = set(getattr(module, "_ddp_params_and_buffers_to_ignore", ()))
        self.device = _check_devices(module, device_ids, self.parameters_to_ignore)
        self.device_type = self.device.type
        self.module = module
        self.device_ids = [self.device.index] if device_ids else None
        self.output_device = self.device.index if device_ids else None
        self.dim = dim
        self.device_mesh = device_mesh
        self.forward_sync_buffers = (
            broadcast_buffers is not False if forward_sync_buffers is None else forward_sync_buffers
        )
        self.find_unused_parameters = find_unused_parameters
        self.gradient_as_bucket_view = gradient_as_bucket_view
        self.static_graph = static_graph
        self.bucket_cap_mb, self.bucket_cap_mb_list = bucket_cap_mb, caps
        self.bucket_bytes_cap_list = [int(cap * MIB) for cap in caps]
        self.bucket_bytes_cap = max(
            self.bucket_bytes_cap_list or [DEFAULT_CAP_BYTES if bucket_cap_mb is None else int(bucket_cap_mb * MIB)]
        )
        self.transport: TransportName = transport
        # The names of PyTorch's attributes: its inherited methods, such as `no_sync` and `join`, use them.
        self.mixed_precision = None
        self.buffer_hook: Any = None
        self.require_backward_grad_sync = True  # average the backwards of forwards that begin now
        self.require_forward_param_sync = True  # buffers may differ from rank 0's
        self.broadcast_bucket_size = 250 * 1024 * 1024  # bytes; read by methods of PyTorch's class
        self.logger = None
        self._divide_by_initial_world_size = True
        self._lazy_init_ran = False
        self._sample_rate = 100
        self._comm_hook_name: str | None = None
        self._joins_uneven_inputs = False
        if not init_sync:
            self._make_reducer()
            return
        skips_buffers = broadcast_buffers is False and forward_sync_buffers is None
        frozen = [(name, parameter) for name, parameter in self._named_parameters() if not parameter.requires_grad]
        buffers = [] if skips_buffers else self._named_buffers()
        # The comparison first: a broadcast between different models crashes or hangs.
        self._make_reducer(untrained={"frozen parameter": frozen, "buffer": buffers})
        broadcast([tensor for _, tensor in [*self._named_parameters(), *buffers]], self.process_group)

    @property
    def broadcast_buffers(self) -> bool:
        """The older name of `forward_sync_buffers`; before torch 2.13 the base class has an attribute of its own."""
        return self.forward_sync_buffers

    @broadcast_buffers.setter
    def broadcast_buffers(self, value: bool) -> None:
        self.forward_sync_buffers = value

    # ---- Forward

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """Return the module's outputs; their backward averages gradients, unless in `no_sync`."""
        inputs, kwargs = self._before_forward(inputs, kwargs)
        outputs = self.module(*inputs, **kwargs)
        self._after_forward(outputs)
        return outputs

    def register_comm_hook(self, state: object, hook: CommunicationHook) -> None:
        """Reduce the buckets by `hook(state, bucket)`, which returns a future of the reduced tensor."""
        _check_hook(hook)
        self.reducer.register_hook(state, hook)
        self._comm_hook_name = getattr(hook, "__qualname__", type(hook).__name__)

    def _register_builtin_comm_hook(self, comm_hook_type: BuiltinCommHookType) -> None:
        """Reduce the buckets by PyTorch's hook of that name: ALLREDUCE or FP16_COMPRESS."""
        self.reducer.register_hook(self.process_group, _BUILTIN_HOOKS[comm_hook_type])
        self._comm_hook_name = str(comm_hook_type)

    @_not_compiled
    def _before_forward(self, inputs: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        reducer = self.reducer
        syncs = torch.is_grad_enabled() and self.require_backward_grad_sync
        if torch.is_grad_enabled():
            if not self._lazy_init_ran:
                self._lazy_init()
            if self._join_config.enable:
                self._notify_joined_ranks()
            # Only after a registration: a walk over all parameters would take time in every forward.
            if self._registrations[0]:
                self._registrations[0] = 0
                self._check_parameters()
                self._module_ids.update(id(module) for module in self.module.modules())
        if syncs and not torch.compiler.is_compiling():  # which would trace the clock, and again for each step
            is_sampled = reducer.step < SAMPLED_STEPS or reducer.step % self._sample_rate == 0
            # Steps without a record run the hooks on their fast path.
            reducer.after_step = [self.timeline.record] if is_sampled else []
            self.timeline.forward_began = time.perf_counter()
        self._sync_buffers_at(_BufferCommHookLocation.PRE_FORWARD, syncs=syncs)
        if self.device_ids is None:
            return inputs, kwargs
        return to_device(inputs, self.device), to_device(kwargs, self.device)

    @_not_compiled
    def _after_forward(self, outputs: Any) -> None:
        syncs = torch.is_grad_enabled() and self.require_backward_grad_sync
        self._sync_buffers_at(_BufferCommHookLocation.POST_FORWARD, syncs=syncs)
        self.require_forward_param_sync = syncs
        if not syncs:
            return
        reducer = self.reducer
        # Output hooks are not enough: a module may keep its loss, or return tensors in objects that are not searched.
        reducer.prepare_for_backward()
        tensors = [tensor for tensor in tensors_in(outputs) if tensor.requires_grad]
        finds_unused = self.find_unused_parameters and not self.static_graph
        unused = unreached_parameters(tensors, reducer.parameters) if finds_unused else []

        def start(gradient: Tensor) -> None:
            reducer.start_on_hook(unused)

        # The outermost backward reaches the outputs first. A parameter's own hook might run in the inner
        # backward of a reentrant checkpoint, which ends too early.
        for tensor in tensors:
            tensor.register_hook(start)

    def _lazy_init(self) -> None:
        """Reject what was done to the module after it was wrapped, before the first forward."""
        # Private: the mark that torch's _apply_optimizer_in_backward leaves on a parameter.
        if any(hasattr(parameter, "_in_backward_optimizers") for parameter in self.reducer.parameters):
            raise RuntimeError(
                "_apply_optimizer_in_backward is not supported here: it would step before gradients are averaged. Call "
                "optimizer.step() after backward, or train with DDPStrategy(optimizer_in_backward=True)."
            )
        self._lazy_init_ran = True

    def _check_parameters(self) -> None:
        """Raise RuntimeError for a trained parameter that was added to the module after it was wrapped."""
        for name, parameter in self._named_parameters():
            is_known = id(parameter) in self._parameters_at_start or not isinstance(parameter, nn.Parameter)
            if parameter.requires_grad and not is_known:  # tensors are those of torch.func.functional_call
                raise RuntimeError(
                    f"the parameter {name} was added or replaced after the module was wrapped, so its gradients would "
                    "not be averaged. Wrap the module again, on every rank: DistributedDataParallel(ddp.module)."
                )

    def _sync_buffers_at(self, location: _BufferCommHookLocation, *, syncs: bool) -> None:
        """Broadcast rank 0's buffers before a forward, or call the buffer hook at its location; collective."""
        # As in PyTorch an evaluation begins with equal buffers too; joined ranks only know of reduced forwards.
        is_due = syncs if self._join_config.enable else self.require_forward_param_sync
        if not (is_due and self.forward_sync_buffers):
            return
        if self.buffer_hook is None:
            if location is _BufferCommHookLocation.PRE_FORWARD:
                self.sync_buffers(candidate=self.process_group.rank())
        elif location is self.buffer_hook.buffer_comm_hook_location and self._named_buffers():
            hook, state = self.buffer_hook.buffer_comm_hook, self.buffer_hook.buffer_comm_hook_state
            # Private: a forward has saved the buffers for its backward, which a higher version would refuse.
            with torch.no_grad(), _unsafe_preserve_version_counter(tuple(self.modules_buffers)):
                self.reducer.awaited += hook(state, self.named_module_buffers) or ()

    def sync_buffers(self, *, candidate: int) -> None:
        """Broadcast the buffers of rank 0, or in `join` of the highest `candidate` of any rank. Collective."""
        buffers = self._named_buffers()
        if buffers:
            source = self.common_rank(candidate) if self._join_config.enable else 0
            broadcast([buffer for _, buffer in buffers], self.process_group, source=source)

    def sync_state(self, *, candidate: int) -> None:
        """Broadcast parameters and buffers of the highest rank that is a `candidate`. Collective."""
        named = [*self._named_parameters(), *self._named_buffers()]
        self._authoritative_rank = self.common_rank(candidate)
        broadcast([tensor for _, tensor in named], self.process_group, source=self._authoritative_rank)
        self.require_forward_param_sync = True  # on all ranks, so that their next forwards have the same collectives

    # ---- Uneven inputs

    def join_hook(self, **kwargs: Any) -> JoinHook:
        """Return the hook that runs instead of forwards and backwards once this rank has no more batches."""
        if self.buffer_hook is not None:
            raise RuntimeError("join() does not support a buffer hook; use broadcast of buffers, which needs none.")
        self._joins_uneven_inputs = True
        self._divide_by_initial_world_size = kwargs.get("divide_by_initial_world_size", True)
        return DDPJoinHook(self)

    def _notify_joined_ranks(self) -> None:
        """Announce a forward to ranks without batches, and whether its backward is reduced. Collective."""
        # Joined ranks make the same collectives in this order, in `Join` and in `DDPJoinHook.main_hook`.
        work = Join.notify_join_context(self)
        if work is not None:
            work.wait()
        counts = torch.tensor([float(self.require_backward_grad_sync), 1.0], device=self.device)
        dist.all_reduce(counts, group=self.process_group)
        active = self.process_group.size() if self._divide_by_initial_world_size else max(1, int(counts[1].item()))
        self.reducer.set_divisor(active)

    def common_rank(self, candidate: int) -> int:
        """Return the highest rank that any rank proposes (-1: none). Collective."""
        rank = torch.tensor([candidate], device=self.device)
        dist.all_reduce(rank, dist.ReduceOp.MAX, group=self.process_group)
        return int(rank.item())

    # ---- State

    def __getstate__(self) -> dict[str, Any]:
        self._check_default_group()  # type: ignore[no-untyped-call] # PyTorch's own: other groups cannot be restored
        state = self.__dict__.copy()
        for name in _NOT_PICKLED:
            del state[name]
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        nn.Module.__setstate__(self, state)  # PyTorch's would make its own Reducer
        self.process_group = _default_group()  # process groups cannot be pickled
        self._make_reducer()

    def _make_reducer(self, *, untrained: Mapping[str, Sequence[tuple[str, Tensor]]] | None = None) -> None:
        named = [(name, parameter) for name, parameter in self._named_parameters() if parameter.requires_grad]
        settings = ReducerSettings(
            bucket_cap_mb=self.bucket_cap_mb,
            bucket_caps_mb=self.bucket_cap_mb_list,
            gradient_as_bucket_view=self.gradient_as_bucket_view,
            find_unused_parameters=(
                "graph" if self.find_unused_parameters else "auto" if self.static_graph else "error"
            ),
            static_graph=self.static_graph,
            timeout_seconds=_timeout_seconds(self.process_group, self.device),
        )
        self.reducer = Reducer(
            named,
            group=self.process_group,
            settings=settings,
            open_transport=partial(open_transport, name=self.transport),
            untrained=untrained,
        )
        self.timeline = Timeline(self.process_group.rank(), size_key="bucket_cap_mb", compressed="register_comm_hook")
        # Parameters outlive this wrapper, and their hooks hold the Reducer: without it they would wait for ranks.
        closing = ExitStack()
        closing.callback(self.reducer.close)
        # Holds the parameters, so that no new one can have the id of one that was replaced.
        self._parameters_at_start = {id(parameter): parameter for parameter in self.module.parameters()}
        self._module_ids = {id(module) for module in self.module.modules()}
        # torch's registration hooks are global: they stay until this wrapper is gone.
        self._registrations = closing.enter_context(count_registrations(self._module_ids))
        self._closing = weakref.finalize(self, closing.close)
        self._closing.atexit = False  # a process that exits frees all of it anyway

    def _named_parameters(self) -> list[tuple[str, nn.Parameter]]:
        ignored = self.parameters_to_ignore
        return [(name, parameter) for name, parameter in self.module.named_parameters() if name not in ignored]

    def _named_buffers(self) -> list[tuple[str, Tensor]]:
        self._assign_modules_buffers()  # type: ignore[no-untyped-call] # again: a step may replace a buffer
        return list(self.named_module_buffers.items())

    # ---- Private methods of PyTorch's class that programs use

    def _get_ddp_logging_data(self) -> dict[str, Any]:
        """Return settings, sizes of buckets and times of this rank, under PyTorch's names where it has them.

        Times are of the last sampled step, in nanoseconds; there are none on CUDA, where they would need a device sync.
        Besides PyTorch's there are `gradient_arrival_times`, from the start of backward to each gradient in order, by
        name, and `ideal_bucket_param_indices`, the buckets that this order would give.
        """
        reducer, plan = self.reducer, self.reducer.plan.buckets
        parameters = reducer.parameters
        backend = str(dist.get_backend(self.process_group))
        dtypes = {str(parameter.dtype).removeprefix("torch.") for parameter in parameters}
        sizes = ", ".join(str(sum(parameters[i].nbytes for i in bucket.parameters)) for bucket in plan)
        fields: dict[str, Any] = {
            "module_name": type(self.module).__name__,
            "world_size": self.process_group.size(),
            "rank": self.process_group.rank(),
            "backend_name": backend,
            "device_ids": ", ".join(map(str, self.device_ids or ())),
            "output_device": -1 if self.output_device is None else self.output_device,
            "broadcast_buffers": int(self.forward_sync_buffers),
            "find_unused_parameters": int(self.find_unused_parameters),
            "gradient_as_bucket_view": int(self.gradient_as_bucket_view),
            "static_graph": int(self.static_graph),
            "has_sync_bn": int(any(isinstance(module, nn.SyncBatchNorm) for module in self.module.modules())),
            "dtypes": ", ".join(sorted({"float32": "float", "float64": "double"}.get(name, name) for name in dtypes)),
            "num_parameter_tensors": len(parameters),
            "total_parameter_size_bytes": sum(parameter.nbytes for parameter in parameters),
            "bucket_cap_bytes": self.bucket_bytes_cap,
            "bucket_sizes": sizes,
            "has_rebuilt_buckets": int(bool(reducer.buckets)),
            "num_buckets_reduced": len(reducer.buckets),
            "join_uneven_inputs": int(self._joins_uneven_inputs),
            "iteration": 0,
        }
        if reducer.failure is not None:
            fields |= {"has_error": 1, "error": reducer.failure}
        if backend == "gloo":
            # Private: a process group does not offer the options of its backends.
            options: Any = self.process_group._get_backend(self.device).options
            fields["gloo_num_threads"] = options._threads
        variables = _LOGGED_VARIABLES + (_LOGGED_VARIABLES_OF_GLOO if backend == "gloo" else ())
        fields |= {name.lower(): os.environ.get(name, "N/A") for name in variables}  # as PyTorch logs them
        if self._comm_hook_name is not None:
            fields["comm_hook"] = self._comm_hook_name
        if reducer.buckets:
            fields["rebuilt_bucket_sizes"] = sizes
            fields["rebuilt_per_bucket_param_indices"] = _indices([bucket.parameters for bucket in plan])
        steps = self.timeline.steady_steps()
        if not steps:
            return fields
        index = {entry.name: entry.index for entry in reducer.entries}
        last = sorted(steps[-1].arrivals, key=steps[-1].arrivals.__getitem__)
        fields["prev_iteration_grad_ready_order_indices"] = ", ".join(str(index[name]) for name in last)
        fields["unused_parameter_size"] = sum(
            p.nbytes for e, p in zip(reducer.entries, parameters, strict=True) if e.name not in last
        )
        if self.device.type == "cpu":
            fields["gradient_arrival_times"] = {name: int(1e9 * at) for name, at in self.timeline.arrivals().items()}
            fields |= logging_times(steps)
        ideal = [[index[name] for name in names] for names in self.timeline.ideal_buckets()]
        return fields | {"ideal_bucket_param_indices": _indices(ideal)}

    def _set_ddp_runtime_logging_sample_rate(self, sample_rate: int) -> None:
        """Record the times of one in `sample_rate` steps after the first ten; the default is 100."""
        if sample_rate < 1:
            raise ValueError(f"the sample rate of the logging data must be at least 1, got {sample_rate}")
        self._sample_rate = sample_rate

    def _set_static_graph(self) -> None:
        """Switch to `static_graph=True`; collective."""
        if self.reducer.step:
            raise RuntimeError("_set_static_graph() should be called before training loop starts")
        if not self.static_graph:
            self.static_graph = True
            self._closing()
            self._make_reducer()

    def _remove_autograd_hooks(self) -> None:
        """Reduce no backward any more."""
        self._closing()

    def _check_reducer_finalized(self) -> None:
        """Raise RuntimeError if the last backward did not complete."""
        if self.reducer.is_open or self.reducer.was_aborted:
            raise RuntimeError("Expected to have finished reduction in the prior iteration: no backward completed.")

    def _set_sparse_metadata(self, global_unique_ids: object) -> NoReturn:
        raise _refused("_set_sparse_metadata")

    def _update_process_group(self, new_process_group: object) -> NoReturn:
        raise _refused("_update_process_group")


class DDPJoinHook(JoinHook):
    """Shadows the forwards and backwards of the other ranks on a rank that has run out of batches."""

    def __init__(self, wrapper: DistributedDataParallel) -> None:
        self.wrapper = wrapper

    def main_hook(self) -> None:
        """Take part in each collective of the others' forward and backward, with zeros as gradients."""
        wrapper = self.wrapper
        # The collectives of `_notify_joined_ranks`, `_sync_buffers_at` and the backward, in the order of active ranks.
        counts = torch.zeros(2, device=wrapper.join_device)  # ranks that will reduce, ranks with a batch
        dist.all_reduce(counts, group=wrapper.process_group)
        if not counts[0].item():
            return
        if wrapper.forward_sync_buffers:
            wrapper.sync_buffers(candidate=-1)
        parameters = wrapper.reducer.parameters
        saved_gradients = [None if parameter.grad is None else parameter.grad.clone() for parameter in parameters]
        try:
            wrapper.reducer.reduce_zeros()
        finally:
            for parameter, gradient in zip(parameters, saved_gradients, strict=True):
                parameter.grad = gradient  # this rank will not zero those of the others

    def post_hook(self, is_last_joiner: bool) -> None:
        """Leave on every rank the state of one that had batches to the end."""
        self.wrapper.sync_state(candidate=self.wrapper.process_group.rank() if is_last_joiner else -1)


def _indices(buckets: Iterable[Iterable[int]]) -> str:
    return ", ".join(" ".join(map(str, bucket)) for bucket in buckets)


def _process_group(process_group: dist.ProcessGroup | None, device_mesh: DeviceMesh | None) -> dist.ProcessGroup:
    """Return the process group of the two arguments; by default the group of all ranks."""
    if device_mesh is None:
        return process_group or _default_group()
    if process_group is not None:
        raise RuntimeError("Cannot specify both process_group and device_mesh arguments. They name the same ranks.")
    if device_mesh.ndim != 1:
        raise RuntimeError(f"Only 1D device mesh is supported, got {device_mesh}; give the dimension of the replicas.")
    return device_mesh.get_group(0)


def _refuse(**arguments: object) -> None:
    """Raise ValueError for arguments that are given; the message names what to use instead."""
    for name, value in arguments.items():
        if value is not None and value is not False:
            raise _refused(name)


def _refused(name: str) -> ValueError:
    return ValueError(f"{name} is not supported here; {_INSTEAD[name]}, or use PyTorch's own class.")


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
    # Private: torch has no public way to ask a group for its timeout.
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
    # Several devices of one kind pass here: the Reducer refuses them, and names them.
    device = min(devices, key=str)
    if device_ids is not None:
        if len(device_ids) > 1:
            raise ValueError(f"device_ids must be None or name one device, got {list(device_ids)}")
        if device_ids and device.type == "cpu":
            raise ValueError(f"device_ids must be None for a module on the CPU, got {list(device_ids)}")
    return device
