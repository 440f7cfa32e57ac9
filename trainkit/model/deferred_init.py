"""Deferred initialization: a task is built without memory, and gets the values of its constructor later.

    with deferred_init():    empty a  normal_ a  empty b  zero_ b  normal_ a      recorded, on the meta device
        task = MyTask()
    make_real(task)          normal_ a -> a    zero_ b -> b                       replayed, on the CPU

The operations that the constructor runs on storages are recorded, and replayed with the same random numbers. A storage
exists from the first operation that matters to its last one, and is then handed over: so each tensor can be moved or
sharded before the next one is made. Operations whose result is overwritten unread are skipped.

Random operations run during the recording too, on temporary tensors: the generators go on as without it, and their
states are recorded. Where the constructor needs the value of a tensor, in `if` or `item()`, what makes it is replayed.

The idea is that of torchdistX's deferred initialization (https://github.com/pytorch/torchdistx).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from inspect import getattr_static
from typing import Any

import torch
from numpy import ndarray
from torch import Tensor, UntypedStorage, nn
from torch.nn.modules import module as hooks
from torch.overrides import TorchFunctionMode

# Private: torch has no public list of the modes in force, and no public way to leave them.
from torch.utils._python_dispatch import (
    TorchDispatchMode,
    _disable_current_modes,
    _get_current_dispatch_mode_stack,
)

# Private: the walk that torch itself makes through the arguments of operators.
from torch.utils._pytree import tree_leaves, tree_map

from trainkit.errors import UserError
from trainkit.task import DEFERRED

_CPU, _META = torch.device("cpu"), torch.device("meta")
_REMEDY = "Build the task without deferred_init: set trainer.deferred_init=false."
"""The attribute of a module with the records of its tensors: (tensor, Record) pairs."""
_EMPTIES = ("empty", "empty_strided", "empty_like", "empty_permuted", "new_empty", "new_empty_strided")
_ALLOCATES = tuple(f"aten::{name}" for name in _EMPTIES)
_DRAWS = ("normal_", "uniform_", "random_", "exponential_", "geometric_", "cauchy_", "log_normal_")
_OVERWRITES = tuple(f"aten::{name}" for name in (*_DRAWS, "fill_", "zero_", "copy_"))
"""Operations that ignore what was in the tensor."""
# What a TorchFunctionMode gets as `func` when code reads these attributes.
_DEVICE, _IS_META, _IS_CPU = (getattr_static(Tensor, name).__get__ for name in ("device", "is_meta", "is_cpu"))

# ---- Records


@dataclass(frozen=True)
class TensorRef:
    """A tensor, by its place in a storage."""

    storage: int
    dtype: torch.dtype
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int

    def covers(self, num_bytes: int) -> bool:
        """Return True if the tensor is its whole storage, each byte once."""
        expected = self.dtype.itemsize
        # From the innermost dimension outwards: each must begin where the smaller one ends.
        for stride, length in sorted(zip(self.stride, self.size, strict=True)):
            if length != 1 and stride * self.dtype.itemsize != expected:
                return False
            expected *= length
        return self.offset == 0 and expected == num_bytes


@dataclass(frozen=True, eq=False)
class Operation:
    """A call of a torch operator that made or changed storages."""

    name: str
    args: Any
    kwargs: dict[str, Any]
    outputs: tuple[TensorRef, ...]
    reads: frozenset[int]
    """Storages whose content matters."""
    writes: frozenset[int]
    overwrites: frozenset[int]
    """Of those that it writes: without regard to what was there."""
    generator_state: Tensor | None
    """Before it; `None` for an operation that is not random."""

    @property
    def touched(self) -> frozenset[int]:
        """All storages of the operation."""
        return self.reads | self.writes


@dataclass(eq=False)
class Recording:
    """The operations of a constructor, in order."""

    operations: list[Operation] = field(default_factory=list)
    storage_bytes: list[int] = field(default_factory=list)


@dataclass(frozen=True, eq=False)
class Record:
    """How the value of a tensor without memory is made."""

    recording: Recording
    tensor: TensorRef
    version: int
    """The tensor's count of changes in place at the end of the recording."""


# ---- Recording


@contextmanager
def deferred_init() -> Iterator[None]:
    """Build modules without memory in this block; training gives them the values that they would have had.

        with trainkit.deferred_init():
            task = MyTask()

    Their parameters and buffers are on the meta device, where later changes of values are lost. Raises UserError for
    what cannot be recorded, such as a tensor on a GPU.
    """
    if any(isinstance(mode, _Recorder) for mode in _get_current_dispatch_mode_stack()):
        raise UserError("deferred_init is inside another deferred_init; remove one of them.")
    recorder, roots = _Recorder(), dict[int, nn.Module]()

    def note(module: nn.Module, name: str, value: object) -> None:
        roots[id(module)] = module

    # Hooks of the whole process: the modules that the block builds are known in no other way.
    with ExitStack() as stack:
        for register in (
            hooks.register_module_parameter_registration_hook,
            hooks.register_module_buffer_registration_hook,
            hooks.register_module_module_registration_hook,
        ):
            stack.callback(register(note).remove)
        stack.enter_context(_CPUDevice(recorder))
        stack.enter_context(recorder)
        yield
    modules = {id(module): module for root in roots.values() for module in root.modules()}.values()
    # After both modes are left, or what follows would be recorded. It drops operations on temporary tensors.
    recorder.finish(tensor for module in modules for _, tensor in _own_tensors(module))
    for module in modules:
        records = [(tensor, recorder.record_of(tensor)) for _, tensor in _own_tensors(module) if recorder.has(tensor)]
        if records:
            # Past the __setattr__ of modules. A module that was built in two blocks has records of both.
            vars(module).setdefault(DEFERRED, []).extend(records)


class _Recorder(TorchDispatchMode):
    """Makes tensors on the meta device, and records the operations on them.

    Tensors that have values, such as those of `torch.tensor`, keep them.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call] # torch does not annotate it
        self._recording = Recording()
        self._indices: dict[int, int] = {}  # of storages, by address
        self._storages: list[UntypedStorage] = []  # alive, so that no address is used twice
        self.on_meta = False
        """True while the constructor itself asks for the meta device."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with torch._C.DisableTorchFunction():  # or tensors would say that they are on the CPU
            return self._dispatch(func, args, dict(kwargs or {}))

    def _dispatch(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        inputs, written = _tensors((args, kwargs)), list(_written(func, args, kwargs))
        # Without tensors and without a device an operator makes a tensor on the CPU.
        device = kwargs.get("device") or (None if inputs else _CPU)
        is_plain = bool(inputs) and all(tensor.is_meta and not self.has(tensor) for tensor in inputs)
        if self.on_meta or (is_plain and device != _CPU):
            return func(*args, **kwargs)  # the constructor's own tensors on the meta device
        if device is not None and device.type not in ("cpu", "meta"):
            raise UserError(f"{func} makes a tensor on {device}, and deferred_init only on the CPU. {_REMEDY}")
        # Private: only the schema tells the parameters of an operator.
        takes_device = any(argument.name == "device" for argument in func._schema.arguments)
        on_cpu = kwargs | ({"device": _CPU} if takes_device and device is not None else {})
        if inputs and not any(tensor.is_meta for tensor in inputs):
            return func(*args, **on_cpu)
        # These read no content, so that their argument may be any tensor.
        for tensor in inputs if func._schema.name not in _ALLOCATES else ():
            self._check(func, tensor)
        # Values are needed at once: a tensor that has some is written, or item() reads one.
        if any(not tensor.is_meta for tensor in written) or func is torch.ops.aten._local_scalar_dense.default:
            return self._run_with_values(func, args, on_cpu)
        # On the CPU such a conversion returns the tensor itself, which a record
        # on the meta device cannot tell from a copy.
        keeps_dtype = func is torch.ops.aten._to_copy.default and kwargs.get("dtype") in (None, args[0].dtype)
        if keeps_dtype and device == _CPU:
            raise UserError(f"{func} may copy a tensor to the CPU, or be the tensor. {_REMEDY}")
        on_meta = kwargs | ({"device": _META} if takes_device else {})
        try:
            result = func(*_map_tensors(args, _on_meta), **_map_tensors(on_meta, _on_meta))
        except (NotImplementedError, RuntimeError) as error:
            if written:
                raise UserError(f"{func} cannot be recorded: {error}. {_REMEDY}") from error
            return self._run_with_values(func, args, on_cpu)  # shapes depend on values, or the error is the user's
        made = _tensors(result)
        if not inputs and made and all(tensor.numel() == 0 for tensor in made):
            return func(*args, **on_cpu)  # there are no values to defer
        for tensor in made:
            self._check(func, tensor, is_new=True)
        self._record(func, args, on_cpu, written, made)
        return result

    def _record(self, func: Any, args: Any, kwargs: dict[str, Any], written: list[Tensor], made: list[Tensor]) -> None:
        # Storages from this index on are made by the operation.
        num_known = len(self._storages)
        outputs = tuple(self._ref(tensor) for tensor in made)
        created = frozenset(ref.storage for ref in outputs if ref.storage >= num_known)
        # Nothing to replay: allocations have no content, and views change none.
        if func._schema.name in _ALLOCATES or torch.Tag.inplace_view in func.tags or not (created or written):
            return
        inputs = [tensor for tensor in _tensors((args, kwargs)) if tensor.is_meta]
        if not inputs and any(argument.name == "dtype" for argument in func._schema.arguments):
            kwargs["dtype"] = made[0].dtype  # the default one may be another later
        overwritten = created
        ignores = func._schema.name in _OVERWRITES or func is torch.ops.aten.bernoulli_.float
        if ignores:
            target, *inputs = inputs
            ref = self._ref(target)
            # Only then is nothing of the old content left.
            if ref.covers(self._storages[ref.storage].nbytes()):
                overwritten = frozenset([ref.storage])
        writes = created | {self._ref(tensor).storage for tensor in written}
        reads = frozenset(self._ref(tensor).storage for tensor in inputs)
        state = None
        if torch.Tag.nondeterministic_seeded in func.tags:
            generators = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Generator)]
            # Taken before the operation runs: the replay draws from the same state.
            state = (generators[0] if generators else torch.default_generator).get_state()
            # For the generator alone, which must go on as it does without deferral.
            self._run_with_values(func, args, kwargs, ignored=target if ignores else None)
        self._recording.operations.append(
            Operation(
                str(func),
                tree_map(self._recorded, args),
                tree_map(self._recorded, kwargs),
                outputs,
                reads,
                writes,
                overwritten,
                state,
            )
        )

    def _recorded(self, leaf: Any) -> Any:
        if isinstance(leaf, torch.Generator):
            return None  # torch's default one, in the recorded state
        if isinstance(leaf, Tensor):
            return self._ref(leaf) if leaf.is_meta else leaf.detach().clone()  # it may be changed later
        return leaf

    def _check(self, func: Any, tensor: Tensor, *, is_new: bool = False) -> None:
        """Raise UserError for a tensor whose content cannot be recorded."""
        what = ""
        if tensor.layout is not torch.strided or tensor.is_quantized or tensor.is_conj() or tensor.is_neg():
            what = "is sparse, quantized, conjugated or negated"
        elif tensor.device not in (_CPU, _META):
            what = f"is on {tensor.device}"
        elif tensor.is_meta and not is_new and not self.has(tensor):
            what = "is on the meta device and was made outside of deferred_init"
        if what:
            raise UserError(f"{func} uses a tensor that {what}, which cannot be recorded. {_REMEDY}")

    def has(self, tensor: Tensor) -> bool:
        """Return True if the value of a tensor is made by the recording."""
        # Private: the address of the storage object. data_ptr is 0 for all storages on the meta device.
        return tensor.is_meta and tensor.untyped_storage()._cdata in self._indices

    def record_of(self, tensor: Tensor) -> Record:
        """Return how the value of a tensor is made."""
        self._recording.storage_bytes = [storage.nbytes() for storage in self._storages]
        # Private: torch has no public count of writes in place. It tells a later change, which a replay would lose.
        return Record(self._recording, self._ref(tensor), tensor._version)

    def finish(self, tensors: Iterable[Tensor]) -> None:
        """Keep only the operations that the values of these tensors depend on."""
        wanted = {self._ref(tensor).storage for tensor in tensors if self.has(tensor)}
        self._recording.operations = live_operations(self._recording.operations, wanted)

    def _ref(self, tensor: Tensor) -> TensorRef:
        storage = tensor.untyped_storage()
        index = self._indices.setdefault(storage._cdata, len(self._storages))
        if index == len(self._storages):
            self._storages.append(storage)
        return TensorRef(index, tensor.dtype, tuple(tensor.size()), tensor.stride(), int(tensor.storage_offset()))

    def value_of(self, tensor: Tensor) -> Tensor:
        """Return the present value of a tensor."""
        record, storages = self.record_of(tensor), list[UntypedStorage]()
        # Or the operations of the replay would be recorded too.
        with _disable_current_modes():
            replay(record.recording, [record.tensor.storage], lambda _, storage: storages.append(storage))
            return _view(record.tensor, storages[0])

    def _run_with_values(self, func: Any, args: Any, kwargs: Any, *, ignored: Tensor | None = None) -> Any:
        """Return the result of an operation on values; it changes only those of tensors that have some."""

        def value(tensor: Tensor) -> Tensor:
            # The operation overwrites it unread: memory of the same layout is enough.
            if tensor is ignored:
                return torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype, device=_CPU)
            return self.value_of(tensor) if tensor.is_meta else tensor

        return func(*_map_tensors(args, value), **_map_tensors(kwargs, value))


class _CPUDevice(TorchFunctionMode):
    """Lets tensors of a recorder say that they are on the CPU, and have their values read."""

    def __init__(self, recorder: _Recorder) -> None:
        super().__init__()
        self._recorder = recorder

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        first = args[0] if args and isinstance(args[0], Tensor) else None
        is_deferred = first is not None and self._recorder.has(first)
        if is_deferred and first is not None:
            if func == _DEVICE:
                return _CPU
            if func in (_IS_META, _IS_CPU):
                return func == _IS_CPU
            if func is Tensor.cpu and len(args) == 1 and not kwargs:
                return first
            if func in (Tensor.numpy, Tensor.__array__, Tensor.tolist):
                host_value = func(self._recorder.value_of(first.detach()), *args[1:], **kwargs)
                if isinstance(host_value, ndarray):
                    host_value.flags.writeable = False  # a change of it would be lost
                return host_value
            if func is Tensor.new_tensor:
                kwargs.setdefault("device", _CPU)
        on_meta = func is not Tensor.to and str(kwargs.get("device")) == "meta"
        if func is Tensor.to:  # `x.to("cpu")` is `x`, not a copy
            device_type = "meta" if is_deferred else "cpu"
            args = (first, *(_placed(value, device_type) for value in args[1:]))
            kwargs = {key: _placed(value, device_type) for key, value in kwargs.items()}
        # Restored below, since a torch function may call others.
        was_on_meta, self._recorder.on_meta = self._recorder.on_meta, on_meta
        try:
            return func(*args, **kwargs)
        finally:
            self._recorder.on_meta = was_on_meta


def _placed(value: Any, device_type: str) -> Any:
    """Return an argument of `Tensor.to` for a tensor on the device `own`."""
    is_host = isinstance(value, (str, torch.device)) and str(value).partition(":")[0] == "cpu"
    return device_type if is_host else value.dtype if isinstance(value, Tensor) else value


def _tensors(tree: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]


def _map_tensors(tree: Any, function: Callable[[Tensor], Tensor]) -> Any:
    return tree_map(lambda leaf: function(leaf) if isinstance(leaf, Tensor) else leaf, tree)


def _on_meta(tensor: Tensor) -> Tensor:
    if tensor.is_meta:
        return tensor
    return torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype, device=_META)


def _written(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Iterator[Tensor]:
    """Yield the tensors that an operator changes."""
    for index, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            yield from _tensors(args[index] if index < len(args) else kwargs.get(argument.name))


# ---- Replaying


def replay(recording: Recording, wanted: Collection[int], complete: Callable[[int, UntypedStorage], None]) -> None:
    """Make the content of the `wanted` storages, and call `complete` with each as soon as it is whole."""
    operations = live_operations(recording.operations, wanted)
    touched = [operation.touched for operation in operations]
    uses = Counter(index for indices in touched for index in indices)
    storages = _Storages(recording.storage_bytes)
    # The generator of the process must not move; devices=[], as saving the state of GPUs would initialize CUDA.
    # Initializers write parameters in place, which autograd refuses.
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        for position in execution_order(touched):
            _run(operations[position], storages)
            uses.subtract(touched[position])
            # Sorted: all ranks then complete the storages in the same order.
            for index in sorted(touched[position]):
                if not uses[index] and index in wanted:
                    complete(index, storages.pop(index))
                elif not uses[index]:
                    del storages[index]
        for index in sorted(set(wanted).difference(uses)):  # memory that nothing was written to
            complete(index, storages.pop(index))


def live_operations(operations: Sequence[Operation], wanted: Collection[int]) -> list[Operation]:
    """Return the operations that the content of the `wanted` storages depends on, in order."""
    live, chosen = set(wanted), list[Operation]()
    for operation in reversed(operations):
        if not live:
            break
        if not live.isdisjoint(operation.writes):
            chosen.append(operation)
            live -= operation.overwrites
            live |= operation.reads
    return chosen[::-1]


def execution_order(touched: Sequence[Collection[int]]) -> Iterator[int]:
    """Yield the operations, given by the storages that they touch, so that few storages are in use at once.

    Those of one storage keep their order. What follows on an operation comes next, after what it waits for:

        recorded    normal_ a   normal_ b   mul_ a   eye c   add_ c to a   mul_ b
        executed    normal_ a   mul_ a   eye c   add_ c to a   normal_ b   mul_ b
    """
    earlier: list[list[int]] = [[] for _ in touched]
    later: list[list[int]] = [[] for _ in touched]
    last: dict[int, int] = {}  # operation on each storage
    for position, indices in enumerate(touched):
        for index in indices:
            if index in last:
                earlier[position].append(last[index])
                later[last[index]].append(position)
            last[index] = position
    # A stack and not recursion: a chain of operations may be longer than Python's recursion limit.
    done = [False] * len(touched)
    stack = list(range(len(touched)))[::-1]
    while stack:
        position = stack.pop()
        awaited = [other for other in earlier[position] if not done[other]]
        if awaited:
            stack += [position, *sorted(awaited, reverse=True)]
        elif not done[position]:
            done[position] = True
            yield position
            # First those that are about fewer storages, as they may end the use of one.
            stack += sorted(later[position], key=lambda other: (len(touched[other]), other), reverse=True)


class _Storages(dict[int, UntypedStorage]):
    """Storages by index, each made when it is first asked for."""

    def __init__(self, num_bytes: Sequence[int]) -> None:
        super().__init__()
        self._num_bytes = num_bytes

    def __missing__(self, index: int) -> UntypedStorage:
        self[index] = torch.empty(self._num_bytes[index], dtype=torch.uint8, device=_CPU).untyped_storage()
        return self[index]


def _run(operation: Operation, storages: _Storages) -> None:
    """Run an operation on storages, and keep those that it makes in the layout that was recorded."""

    def value(leaf: Any) -> Any:
        return _view(leaf, storages[leaf.storage]) if isinstance(leaf, TensorRef) else leaf

    if operation.generator_state is not None:
        torch.default_generator.set_state(operation.generator_state)
    try:
        function = _operator(operation.name)
        made = _tensors(function(*tree_map(value, operation.args), **tree_map(value, operation.kwargs)))
    except (AttributeError, RuntimeError, NotImplementedError) as error:
        raise UserError(f"{operation.name} was recorded, and cannot be replayed: {error}. {_REMEDY}") from error
    for ref, tensor in zip(operation.outputs, made, strict=True):
        # By storage: the operation may return a view of an argument.
        indices = {storage._cdata: index for index, storage in storages.items()}
        index = indices.get(tensor.untyped_storage()._cdata)
        is_new = index is None and ref.storage in operation.overwrites and ref.storage not in storages
        if tensor.dtype != ref.dtype or tensor.size() != ref.size or not (is_new or index == ref.storage):
            raise UserError(f"{operation.name} made another tensor than when it was recorded. {_REMEDY}")
        if is_new and tensor.stride() == ref.stride and tensor.storage_offset() == ref.offset:
            storages[ref.storage] = tensor.untyped_storage()
        # The kernel of the CPU may choose another layout than the recording on the meta device.
        elif is_new:
            _view(ref, storages[ref.storage]).copy_(tensor)


def _operator(name: str) -> Any:
    namespace, packet, overload = name.split(".")
    return getattr(getattr(getattr(torch.ops, namespace), packet), overload)


def _view(ref: TensorRef, storage: UntypedStorage) -> Tensor:
    return torch.empty(0, dtype=ref.dtype, device=_CPU).set_(storage, ref.offset, ref.size, ref.stride)


# ---- Tasks


def records_of(task: nn.Module) -> dict[str, Record]:
    """Return how the values of a task's tensors on the meta device are made, by name.

    Raises UserError for parameters and buffers of which this is unknown: they were not built in `deferred_init`, or
    were changed since.
    """
    # By id, which stays unique: the records hold their tensors.
    by_id = {id(tensor): record for module in task.modules() for tensor, record in vars(module).get(DEFERRED, ())}
    registered = {id(tensor) for tensor in (*task.parameters(), *task.buffers())}
    records = {}
    for name, tensor in _named_tensors(task):
        record = by_id.get(id(tensor))
        if not tensor.is_meta or tensor.grad_fn is not None:  # what was computed from parameters is computed again
            continue
        if record is None and id(tensor) not in registered:
            continue
        what = ""
        if record is None:
            what = "is on the meta device, and has no known value"
        elif tensor._version not in (0, record.version) or tensor.size() != record.tensor.size:  # 0: of a copy
            what = "was changed after it was built in deferred_init"
        # Private: torch has no public question for the hooks of a tensor.
        elif tensor._backward_hooks or tensor._post_accumulate_grad_hooks:
            what = "was built in deferred_init and has a hook, which it would lose"
        if record is None or what:
            raise UserError(
                f"{name} of {type(task).__name__} {what}. Build the whole task in `with trainkit.deferred_init():` and "
                "leave it as it is (trainer.deferred_init=true does so), or build it on the CPU."
            )
        records[name] = record
    return records


def make_real(
    task: nn.Module,
    *,
    device: torch.device = _CPU,
    records: Mapping[str, Record] | None = None,
    take: Callable[[Tensor, Tensor], bool] = lambda tensor, value: False,
) -> None:
    """Give the tensors of a task that was built in `deferred_init` their values, one storage after the other.

    They stay the same objects, in the dtype and memory format that they have by now. Raises UserError for other
    tensors on the meta device.

    Args:
        task: The task; one without tensors on the meta device stays as it is.
        device: The device of the tensors.
        records: How the values are made; by default the task's `records_of`.
        take: Called with a tensor and its value; returns True if it keeps itself what it needs of the value.

    """
    chosen = records_of(task) if records is None else records
    tensors = dict(_named_tensors(task))
    by_recording: dict[int, tuple[Recording, dict[int, list[str]]]] = {}
    for name, record in chosen.items():
        _, names = by_recording.setdefault(id(record.recording), (record.recording, {}))
        names.setdefault(record.tensor.storage, []).append(name)

    def keep(name: str, storage: UntypedStorage) -> None:
        tensor, value = tensors[name], _view(chosen[name].tensor, storage)
        if not take(tensor, value) and tensor.is_meta:
            replace_content(tensor, _like(tensor, value, device))

    for recording, names in by_recording.values():
        # Bound by a default, as a function that is made in a loop must not read the loop's variable later.
        def complete(index: int, storage: UntypedStorage, names: dict[int, list[str]] = names) -> None:
            for name in names[index]:
                if name in tensors:
                    keep(name, storage)

        replay(recording, names, complete)
    for module in task.modules():
        vars(module).pop(DEFERRED, None)


def replace_content(tensor: Tensor, content: Tensor) -> None:
    """Give a tensor the content, device and layout of another; it stays the same object, with its attributes."""
    # Private: the public torch.utils.swap_tensors refuses a tensor with weak references, as nn.LSTM has.
    torch._C._swap_tensor_impl(tensor, Tensor._make_subclass(Tensor, content, tensor.requires_grad))


def _like(tensor: Tensor, value: Tensor, device: torch.device) -> Tensor:
    """Return a value on the device, in the dtype and memory format of `tensor`."""
    moved = value.to(device, tensor.dtype)
    if moved.stride() == tensor.stride():
        return moved
    # The task may have been converted, for instance to channels_last, after it was built.
    return torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype, device=device).copy_(moved)


def _named_tensors(task: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield the parameters, buffers and other attributes that are tensors, by name."""
    for prefix, module in task.named_modules():
        for name, tensor in _own_tensors(module):
            yield f"{prefix}.{name}" if prefix else name, tensor


def _own_tensors(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    # Private dictionaries: named_parameters() gives a tensor that two modules share one name only.
    for name, value in (*module._parameters.items(), *module._buffers.items(), *vars(module).items()):
        if isinstance(value, Tensor):
            yield name, value
        elif isinstance(value, (list, tuple, dict)) and name not in ("_parameters", "_buffers", "_modules", DEFERRED):
            items = value.items() if isinstance(value, dict) else enumerate(value)
            yield from ((f"{name}[{key}]", item) for key, item in items if isinstance(item, Tensor))
