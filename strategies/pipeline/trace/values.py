"""The tensors of a traced step: values, which the batch holds or nodes make, and results of operations out of sight."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from torch import Tensor

from trainkit.errors import UserError

from .graph import Node, Value
from .memories import Memories, address_of


class TracedValues:
    """The values of a step, numbered; tensors are known by identity, as they have no names."""

    def __init__(self, batch: Sequence[Tensor]) -> None:
        self.all: list[Value] = []
        self.memories = Memories(batch)
        self.kept: list[Tensor] = []
        """The tensors: their ids stay unique only while they live."""
        self.written_alias_sets: list[tuple[list[int], int]] = []
        """The values that share memory at a write to one of them, and the index of the node that writes."""
        self._indices: dict[int, int] = {}
        self._views: dict[int, list[int]] = {}  # by address, as arrays and detached tensors share memory too
        for tensor in batch:
            self.add(tensor, local=True)

    def add(self, tensor: Tensor, *, local: bool) -> int:
        """Return the number of a new value; `local` values are known to every stage."""
        index = len(self.all)
        self.all.append(Value(tuple(tensor.shape), tensor.dtype, local, self.memories.index(tensor)))
        self._indices[id(tensor)] = index
        self.kept.append(tensor)
        self._views.setdefault(address_of(tensor), []).append(index)
        return index

    def index(self, tensor: Tensor) -> int | None:
        """Return the number of a tensor; `None` for one that is no value."""
        return self._indices.get(id(tensor))

    def indices(self, tensors: Iterable[Tensor]) -> list[int]:
        """Return the numbers of those tensors that are values."""
        return [self._indices[id(tensor)] for tensor in tensors if id(tensor) in self._indices]

    def note_write(self, tensor: Tensor, node: Node) -> None:
        """Note that a node has written to a tensor, if several values share its memory."""
        alias_set = self._views.get(address_of(tensor), [])
        if len(alias_set) > 1:
            # A copy, as views that later calls make join the set.
            self.written_alias_sets.append((list(alias_set), node.index))


@dataclass(frozen=True, slots=True)
class HiddenResult:
    """A tensor made by an operation that function modes do not see, and what it was made from."""

    tensor: Tensor
    operation: str
    location: str
    values: tuple[int, ...]
    parameters: tuple[str, ...]


class HiddenResults:
    """Results of operations that function modes do not see, and the nodes that use them."""

    def __init__(self) -> None:
        self._results: dict[int, HiddenResult] = {}
        self._uses: list[tuple[Node, HiddenResult]] = []

    def add(
        self,
        made: Sequence[Tensor],
        used: Sequence[Tensor],
        *,
        operation: str,
        location: str,
        values: Sequence[int],
        parameters: Sequence[str],
    ) -> None:
        """Add the tensors that an operation has made from those that it used, some of them values and parameters."""
        # Hidden operations are chained: the first has the values of the step, and the last the result that is used.
        sources = [self._results[id(tensor)] for tensor in used if id(tensor) in self._results]
        all_values = (*values, *(value for source in sources for value in source.values))
        all_parameters = (*parameters, *(name for source in sources for name in source.parameters))
        for tensor in made:
            self._results[id(tensor)] = HiddenResult(tensor, operation, location, all_values, all_parameters)

    def used_by(self, node: Node, tensor: Tensor) -> HiddenResult | None:
        """Return the result that a tensor is, noting that a node uses it; `None` for another tensor."""
        result = self._results.get(id(tensor))
        if result is not None:
            self._uses.append((node, result))
        return result

    def check_uses(self, values: Sequence[Value]) -> None:
        """Raise UserError for a node that uses a result which not every stage can compute."""
        for node, hidden in self._uses:
            if hidden.parameters or any(not values[value].local for value in hidden.values):
                raise UserError(
                    f"{node} uses what {hidden.operation} made at {hidden.location}, which is called by code that a "
                    "trace cannot see, such as a C++ extension: other stages would compute it from placeholders. Call "
                    "that code inside one module's forward, or in a torch.autograd.Function."
                )

    def release(self) -> list[Tensor]:
        """Return the tensors, and keep them no longer."""
        released = [result.tensor for result in self._results.values()]
        self._results.clear()
        self._uses.clear()
        return released
