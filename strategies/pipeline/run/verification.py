"""Verification: a step of the pipeline, compared with the traced step and with the same step in one process.

The first stage of each replica gathers the whole task and runs the step before the pipeline does. Both runs keep a
checksum of what every node makes, of the gradients, and of the state that the step changes.
"""

from __future__ import annotations

import math
import os
import zlib
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from trainkit.devices import has_streams, memory
from trainkit.distributed.collectives import Collectives
from trainkit.errors import UserError
from trainkit.metrics.sync import detach_metrics, metrics_in
from trainkit.model.attribute_snapshot import AttributeSnapshot, preserve_task
from trainkit.tree import dense_parts, tree_leaves

from ..plan.stage import Placement
from ..trace.attributes import place_of
from ..trace.graph import Node, TracedGraph, num_bytes, tensors
from .gradients import StageGradients
from .mesh import PipelineMesh
from .stage_executor import StageExecutor
from .state import PipelineState

MEMORY_SHARE = 0.125
"""Largest share of the free memory that the parameters may take in a step that is verified by default."""
_SHARE_OF_TOTAL = 0.01
"""Gradients may differ by rounding of this share of their norm over all parameters, for those that cancel out."""
# Elements that are read at once: their copies in double precision take 8 MiB each, of tensors of any size.
_CHUNK = 1 << 20


class VerificationError(UserError):
    """A step of the pipeline differs from the same step in one process."""


class Checksum(NamedTuple):
    """A projection of a tensor on one direction, and a bound of its size; both add up over replicas."""

    projection: float = 0.0
    size: float = 0.0

    def differs(self, expected: Checksum, tolerance: float) -> bool:
        """Return True if the projections differ by more than a share of the expected size."""
        # A step that is infinite or NaN in one process too is no error of the pipeline.
        if not math.isfinite(expected.projection):
            return math.isfinite(self.projection)
        # `not <=`, as every comparison with NaN is false, and NaN where a number is expected must differ.
        return not abs(self.projection - expected.projection) <= tolerance * expected.size


_UNINITIALIZED = frozenset(
    ("empty", "empty_like", "empty_permuted", "empty_strided", "new_empty", "new_empty_strided", "resize_")
)
"""Calls whose result is uninitialized memory."""


@dataclass
class StepRecord:
    """Checksums of one step on one rank."""

    values: dict[tuple[int, int], Checksum] = field(default_factory=dict)
    """What nodes made, by the seed of the micro-batch and the index of the node."""
    gradients: dict[str, Checksum] = field(default_factory=dict)
    state: dict[str, Checksum] = field(default_factory=dict)
    """State that the step changes, by name."""
    precision: float = 0.0
    """Machine epsilon of the least precise type met."""
    _uninitialized: set[int] = field(default_factory=set)  # values made so; not compared, as a write may leave parts

    def add_node(self, seed: int, node: Node, given: Any, result: Any) -> None:
        """Record what a node made; arguments count for the size, as rounding errors come from them."""
        values = {output.value for output in node.outputs}
        if node.name in _UNINITIALIZED:
            self._uninitialized |= values
        if values & self._uninitialized:
            return
        made = self._checksum(tensors(result))
        # The largest argument, since a result may be near zero where large numbers cancel out.
        given_size = max((self._checksum([tensor]).size for tensor in tensors(given)), default=0.0)
        self.values[seed, node.index] = Checksum(made.projection, made.size + given_size)

    def add_gradients(self, parameters: Mapping[str, nn.Parameter]) -> None:
        """Record the gradients of parameters by name."""
        for name, parameter in parameters.items():
            self.gradients[name] = self._checksum([] if parameter.grad is None else [parameter.grad])

    def add_state(self, task: nn.Module, names: Iterable[str]) -> None:
        """Record state of the task by name: its tensors and numbers."""
        for name in names:
            table, key = place_of(task, name)
            # `get`: an attribute may be missing, as a step may delete it.
            leaves = tree_leaves(table.get(key))
            numbers = [torch.as_tensor(leaf) for leaf in leaves if isinstance(leaf, (Tensor, int, float))]
            self.state[name] = self._checksum(numbers)

    def _checksum(self, measured: Sequence[Tensor]) -> Checksum:
        projection = square = 0.0
        # Function modes and tensor subclasses of the user must not see these operations, some of them within a step.
        with torch.no_grad(), torch._C.DisableTorchFunction():
            for tensor in measured:
                if tensor.is_floating_point():
                    self.precision = max(self.precision, torch.finfo(tensor.dtype).eps)
                for start, part in _flat_parts(tensor):
                    # Weights that differ from element to element: a sum alone would miss two swapped elements. Any
                    # other frequency would do. In float64, or rounding of the sum would hide small errors.
                    phase = torch.arange(start, start + len(part), dtype=torch.float64, device=part.device)
                    projection += float(part @ phase.add_(1.0).mul_(0.73).cos_())
                    # Of the finite elements: with NaN for a size, no later value would be near enough.
                    finite = part.where(part.isfinite(), 0.0)
                    square += float(finite @ finite)
        return Checksum(projection, math.sqrt(square))


def _flat_parts(tensor: Tensor) -> Iterator[tuple[int, Tensor]]:
    tensor = tensor.detach().to_dense() if tensor.layout is not torch.strided else tensor.detach()
    if tensor.is_quantized:
        tensor = tensor.dequantize()
    # Read only, so that a copy which `reshape` may make is harmless.
    flat = (torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor).reshape(-1)
    for start in range(0, len(flat), _CHUNK):
        yield start, flat[start : start + _CHUNK].double()


class Verification:
    """One step of a replica, computed in one process and then by the pipeline."""

    def __init__(self, task: nn.Module, executor: StageExecutor, mesh: PipelineMesh, *, step: int) -> None:
        self._task, self._executor, self._mesh, self._step = task, executor, mesh, step
        self._expected, self._found = StepRecord(), StepRecord()
        self._changed = executor.graph.written | executor.graph.replaced
        self._trained = {  # those that may have gradients of other steps cannot be compared
            name: parameter
            for name, parameter in task.named_parameters()
            if parameter.requires_grad and parameter.grad is None
        }

    def run_in_one_process(
        self, run: Callable[[StageExecutor], None], state: PipelineState, gradients: StageGradients
    ) -> None:
        """Call `run` with an executor of the whole step, on the first stage alone. Collective."""
        task, is_first = self._task, self._mesh.stage == 0
        # Preserved first and restored last: `whole_on_first` assigns attributes of other stages for good.
        with preserve_task(task) if is_first else nullcontext(), state.whole_on_first(task, self._executor.device):
            if not is_first:  # only here: every stage takes part in gathering and returning the state
                return
            whole_executor = self._executor.as_one_stage(task, rank=0)
            with detach_metrics(metrics_in(task)), gradients.detached(), _without_gradients(task):
                with _recorded(whole_executor, self._expected):
                    run(whole_executor)
                # Before the contexts end, which drop these gradients and restore the state.
                self._expected.add_gradients(self._trained)
                self._expected.add_state(task, sorted(self._changed))

    def recorded(self) -> AbstractContextManager[None]:
        """Return a context in which the step of the pipeline is recorded."""
        return _recorded(self._executor, self._found)

    def finish(self, placement: Placement, comm: Collectives, *, name: str) -> None:
        """Raise VerificationError on every rank if one has computed other values; `name` is that of this rank.

        Collective over all ranks, before the optimizer's step.
        """
        stage = self._mesh.stage
        self._found.add_gradients({k: weight for k, weight in self._trained.items() if placement.is_held(k, stage)})
        # Of one stage each: stages that hold a copy which does not count may have another value.
        counted = (k for k in sorted(self._changed) if k in placement.holders and placement.counted(k, stage))
        self._found.add_state(self._task, counted)
        of_ranks = comm.all_gather_object((name, self._found, self._expected))
        records = [of_ranks[rank] for ranks in self._mesh.grid for rank in ranks]
        rank_records = [(rank, record) for rank, record, _ in records]
        expected = [record for _, _, record in records[:: self._mesh.stages]]  # those of the first stages
        # Every rank compares all records, so that all raise the same error and none waits for another.
        check_equal(self._executor.graph, rank_records, expected, step=self._step)


@contextmanager
def _recorded(executor: StageExecutor, record: StepRecord) -> Iterator[None]:
    executor.recorder = record.add_node
    try:
        yield
    finally:
        executor.recorder = None


@contextmanager
def _without_gradients(task: nn.Module) -> Iterator[None]:
    saved_gradients = [(parameter, parameter.grad) for parameter in task.parameters()]
    for parameter, _ in saved_gradients:
        parameter.grad = None
    try:
        yield
    finally:
        for parameter, gradient in saved_gradients:
            parameter.grad = gradient


def check_equal(
    graph: TracedGraph, found: Sequence[tuple[str, StepRecord]], expected: Sequence[StepRecord], *, step: int
) -> None:
    """Raise VerificationError for the first difference, in the order of computation.

    Args:
        graph: The step.
        found: For each rank its name and its record, replica by replica.
        expected: For each replica the record of one process.
        step: Number of the step.

    """
    # Half of the digits of the least precise type: orders of summation differ in fewer, and errors in more.
    tolerance = math.sqrt(max((record.precision for record in expected), default=0.0))
    per_replica = len(found) // len(expected)
    for replica, record in enumerate(expected):
        ranks = found[replica * per_replica : (replica + 1) * per_replica]
        seeds = list(dict.fromkeys(seed for seed, _ in record.values))
        for (seed, index), value in record.values.items():
            for rank, rank_record in ranks:
                # A rank without the value has nothing to differ in: another stage has made it.
                if rank_record.values.get((seed, index), value).differs(value, tolerance):
                    what = f"{graph.nodes[index]} made other values for micro-batch {seeds.index(seed)}"
                    raise _error(what, rank, step=step)
    # Of all replicas: the pipeline's gradients are reduced over them already, those of one process are not.
    total = math.hypot(*(value.size for record in expected for value in record.gradients.values()))
    users = graph.parameter_users
    names = {name for record in expected for name in record.gradients}
    for name in sorted(names, key=lambda name: (-max(users.get(name, [-1])), name)):  # in the order of backward
        sums = [record.gradients[name] for record in expected]
        size = sum(value.size for value in sums) + _SHARE_OF_TOTAL * total
        value = Checksum(sum(value.projection for value in sums), size)
        for rank, rank_record in found:
            if rank_record.gradients.get(name, value).differs(value, tolerance):
                node = f", used by {graph.nodes[max(users[name])]}," if name in users else ""
                raise _error(f"'{name}'{node} has another gradient", rank, step=step)
    for replica, record in enumerate(expected):
        for rank, rank_record in found[replica * per_replica : (replica + 1) * per_replica]:
            for name, value in record.state.items():
                if rank_record.state.get(name, value).differs(value, tolerance):
                    raise _error(f"the step left another '{name}' behind", rank, step=step)


def _error(what: str, rank: str, *, step: int) -> VerificationError:
    return VerificationError(
        f"step {step} is not that of one process: {what} on {rank}. Put the code around it into one module's forward, "
        "which may run any code, or type strategy=ddp. strategy.verify=off trains without this check."
    )


def fits_in_memory(task: nn.Module, device: torch.device) -> bool:
    """Return True if the whole task takes a small share of the free memory of the device."""
    needed = sum(num_bytes(tensor) for tensor in (*task.parameters(), *task.buffers()))
    if has_streams(device):
        free = memory(device).free
    elif "SC_AVPHYS_PAGES" in os.sysconf_names:
        free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    else:
        free = 1 << 33  # 8 GiB, an assumption: the system does not tell
    return needed <= MEMORY_SHARE * free


# ---- State that a trace has not seen


class FirstStepCheck:
    """Comparison of what the first real step changes with what the traced one changed.

    `expected` are the names of state that the traced step changed, and `held` is the state of this rank by name.
    """

    def __init__(
        self, task: nn.Module, expected: Collection[str], held: Mapping[str, Tensor], ignored: Iterable[nn.Module]
    ) -> None:
        self._expected = expected
        self._snapshot = AttributeSnapshot(task, ignored)
        self._held = {name: tensor for name, tensor in held.items() if name not in expected}
        # Contents, not version counters, which miss what is written through `.data` or a numpy array.
        self._contents = {name: _fingerprint(tensor) for name, tensor in self._held.items()}

    def finish(self) -> None:
        """Raise UserError if the step changed other state than expected."""
        written = [name for name, tensor in self._held.items() if _fingerprint(tensor) != self._contents[name]]
        names = [*written, *(name for name in self._snapshot.changed() if name not in self._expected)]
        names += self._snapshot.replaced()
        if names:
            raise UserError(
                f"the first step changed '{names[0]}', which the traced step did not, so other stages and checkpoints "
                "would miss it. Change it in every step, by torch operations or by assigning it to an attribute of a "
                "module; empty a container at the beginning of the step, as a stage ends before the end of it; or type "
                "strategy=ddp."
            )


def _fingerprint(tensor: Tensor) -> int:
    """Return a checksum of the contents, which are copied to the host part by part."""
    value = 0
    for part in dense_parts(tensor.detach()):
        # As bytes: numpy lacks some types, such as bfloat16, and NaN is the same as itself.
        value = zlib.crc32(part.cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data, value)
    return value
