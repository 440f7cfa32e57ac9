"""The attributes and buffers that a step changes, and the nodes at which it does so."""

from __future__ import annotations

from collections.abc import Callable, Sequence, Set
from typing import TypeVar

from torch import Tensor, nn

from trainkit.errors import UserError
from trainkit.model.attribute_watch import Access, AttributeWatch
from trainkit.tree import tree_leaves

from .graph import Node
from .hazards import check_iterators
from .step_state import PreservedState

T = TypeVar("T")


def with_item(items: tuple[T, ...], item: T) -> tuple[T, ...]:
    """Return the items with another one at their end, unless it is one of them."""
    return items if item in items else (*items, item)


class StateChanges:
    """The attributes that a step changes, and the buffers that it replaces.

    `before` is the state of the task before the step, `position` returns the index of the present node and the leaf
    module that runs, and `elsewhere` are the names of the state that other steps change.
    """

    def __init__(
        self, task: nn.Module, before: PreservedState, position: Callable[[], tuple[int, str]], *, elsewhere: Set[str]
    ) -> None:
        self.watch = AttributeWatch(task, position)
        self._task, self._before, self._elsewhere = task, before, elsewhere
        self.again: Set[str] = set()
        """Attributes that a second run of the step writes."""
        self.used_again: Set[str] = set()
        """Attributes whose tensors of before the second run uses."""
        self.changed: dict[str, list[Tensor]] = {}
        """By name, the tensors in the new values."""
        self.attribute_with: dict[int, str] = {}
        """The attribute whose new value is a tensor, by the tensor's identity."""
        self._of_tensors_alone: set[str] = set()
        self.cached: set[int] = set()
        """Tensors that a module keeps for its own calls, by identity."""
        self.handed_on: list[str] = []
        """Attributes with tensors that a micro-batch reads before it writes to them."""
        self.reset: frozenset[str] = frozenset()
        """Attributes that the step writes, and gives back their former values."""

    def read(self) -> bool:
        """Read what a run has changed, and return True if there is any; raises UserError for what it must not do."""
        replaced = self._before.attributes.replaced()
        if replaced:
            raise UserError(
                f"the step registers or replaces '{replaced[0]}', which the other stages and the optimizer do not see. "
                "Register it in the task's constructor, and write to it in place: under torch.no_grad(), "
                f"self.{replaced[0]}.copy_(...)."
            )
        check_iterators(list(self.watch.iterators))
        new_values = self._before.attributes.changed()
        # Now, as a second run changes what is in containers.
        self.changed = {name: self._before.attributes.tensors_in(value) for name, value in new_values.items()}
        self.attribute_with = {id(value): name for name, value in new_values.items() if isinstance(value, Tensor)}
        self._of_tensors_alone = {
            name for name, value in new_values.items() if all(isinstance(leaf, Tensor) for leaf in tree_leaves(value))
        }
        return bool(self.changed)

    def written(self) -> set[str]:
        """Return the names of the attributes and buffers that the step wrote, also with what was there before."""
        written = {name for name, access in self.watch.accesses.items() if access.last_write is not None}
        return written | set(self._before.attributes.changed())

    def add_to(
        self,
        nodes: Sequence[Node],
        *,
        use: Callable[[Node, Tensor], None],
        is_value: Callable[[Tensor], bool],
        has_hooks: bool,
    ) -> None:
        """Add to the nodes the attributes that the step changes, and the buffers that it replaces, where it does so.

        `use` notes that a node uses a tensor, `is_value` tells whether the batch or a node has made one, and
        `has_hooks` whether a leaf module has hooks.

        A stage runs the code between nodes from the beginning of the step to its own last node, so what that code
        writes to an attribute is the same in all later stages: only the nodes up to the last write share a stage, and
        none if the attribute is written before it is read. What a leaf module writes is in its stage alone.
        """
        buffers = {name for name, _ in self._task.named_buffers(remove_duplicate=False)}
        states = {*self.changed, *self._elsewhere}
        for node in nodes:
            states.update(node.written_buffers)
        for node in nodes:  # other attributes are constants
            node.buffers = tuple(name for name in node.buffers if name in states or name in buffers)
        for name, attribute_tensors in self.changed.items():
            access = self.watch.accesses.get(name)
            # One user: the code between nodes, or one leaf module. Several would need the cache of another stage.
            if name not in self.again and (access is None or len(access.users) == 1):
                self.cached.update(id(tensor) for tensor in attribute_tensors)
                continue  # a cache, which each stage fills
            if access is None:
                raise UserError(
                    f"the step changes the attribute '{name}' in a way that cannot be followed. Assign it by "
                    f"self.{name.rpartition('.')[2]} = ... in its module, or type strategy=ddp."
                )
            if attribute_tensors and access.reads_first and self.kind_of(name) == "attribute":
                self.handed_on.append(name)
            # Hooks of modules may have kept a container that holds only tensors of this step.
            is_kept = (
                access.last_write is None
                and has_hooks
                and name not in self.used_again
                and name in self._of_tensors_alone
                and all(map(is_value, attribute_tensors))
            )
            last = self._add_access(nodes, name, access, is_kept=is_kept)
            # The last write also uses what it assigns, which the stage of that node must have.
            for tensor in attribute_tensors:
                use(nodes[last], tensor)
        written = {name for node in nodes for name in node.written_buffers}
        for name in self._elsewhere - set(self.changed) - written:
            if (access := self.watch.accesses.get(name)) is not None:
                for index in (access.first, access.last):
                    nodes[index].buffers = with_item(nodes[index].buffers, name)
        self.reset = frozenset(
            name
            for name, access in self.watch.accesses.items()
            if access.last_write is not None and name not in self.changed
        )

    def _add_access(self, nodes: Sequence[Node], name: str, access: Access, *, is_kept: bool) -> int:
        """Add an attribute to the nodes that read it first and write it last, and return the index of the latter."""
        # A container has changed inside, or a leaf module has written: other stages do not.
        is_inside = access.last_write is None or access.writers != {""}
        last = access.last if access.last_write is None or is_inside else access.last_write
        if (access.reads_first or is_inside) and not is_kept:
            nodes[access.first].buffers = with_item(nodes[access.first].buffers, name)
        nodes[last].written_buffers = with_item(nodes[last].written_buffers, name)
        return last

    def kind_of(self, name: str) -> str:
        """Return whether a name is that of a parameter, a buffer or an attribute."""
        owner, _, key = name.rpartition(".")
        module = self._task.get_submodule(owner)
        return "parameter" if key in module._parameters else "buffer" if key in module._buffers else "attribute"
