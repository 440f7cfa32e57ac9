"""Tracer of a step: module calls and torch functions become the nodes of a graph."""

from __future__ import annotations

import os
import sys
import weakref
import zlib
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn

# Private: torch exports fake tensors nowhere else.
from trainkit.errors import UserError
from trainkit.model.attribute_snapshot import preserve_task
from trainkit.model.attribute_watch import outline
from trainkit.rng import python_rng_state
from trainkit.tree import tree_leaves, tree_map

from .attributes import class_numbers
from .constraints import (
    alias_constraints,
    checkpoint_constraints,
    gradient_constraints,
    mark_batch_only_nodes,
    written_buffer_constraints,
)
from .costs import ModuleCall, ModuleCosts
from .graph import (
    NOMINAL,
    RETURN,
    Call,
    Constant,
    CutConstraint,
    Node,
    NodeOutput,
    ParameterRef,
    Rates,
    ScalarValue,
    Step,
    TracedGraph,
    Value,
    ValueRef,
    encoded,
    is_number,
    num_bytes,
    tensors,
)
from .hazards import ARRAYS, Hazards, check_classes, parameter_hook_constraints
from .interceptor import ModuleInterceptor, TracingMode, function_name, without_hooks
from .memories import base_of, version_of
from .state_changes import StateChanges, with_item
from .step_state import PreservedState, StateNames, copy_batch, preserve_state, use_fake_tensors
from .values import HiddenResults, TracedValues

SIDE_EFFECTS = frozenset({"register_hook", "register_post_accumulate_grad_hook", "retain_grad"})
"""Calls without a tensor as result that are made once, in the stage they belong to."""


def trace(
    task: nn.Module,
    step: Step,
    batch: Any,
    *,
    leaf_modules: frozenset[str],
    fake: bool = False,
    preceding: Sequence[Step] = (),
    left_behind: frozenset[str] = frozenset(),
    changed: frozenset[str] = frozenset(),
    rates: Rates = NOMINAL,
) -> TraceResult:
    """Trace one run of `step` on a copy of `batch`; the task and all generators are restored.

    Calls of the modules named in `leaf_modules` are one node each, and so is every torch call outside of them. With
    `fake` nothing is computed and no memory is used: parameters may be on the meta device. `preceding` are the
    steps of other phases, which run before, and `left_behind` the attributes in which these leave tensors of one stage;
    using one is an error. `changed` are the names of the state that other steps change. `rates` are those of the device
    that trains: every stage computes what depends on the batch alone if it is cheap there.
    """
    # All modules, not the leaf modules alone: the costs and callees inside a module decide where it is expanded.
    interceptor = ModuleInterceptor(task, [name for name, _ in task.named_modules() if name])

    def record(tracer: Tracer, *, counts_saved: bool) -> Any:
        # Weak: graphs of tensors that the tracer keeps hold this function, and nothing frees a cycle through C++.
        count_saved = partial(Tracer.count_saved, weakref.proxy(tracer))
        counted = torch.autograd.graph.saved_tensors_hooks(count_saved, lambda saved: saved)
        saved, watched = counted if counts_saved else nullcontext(), tracer.changes.watch.installed()
        numbers = class_numbers(task)
        with watched, interceptor.installed():
            with interceptor.handled_by(tracer), tracer.costs.counter, saved, tracer:
                result = step(tracer.batch)
            # Before the classes are swapped back: `type(self).x = ...` in a step sets a number on a swapped class.
            check_classes(numbers, class_numbers(task))
        return result

    def run(*, counts_saved: bool = True, calls_hooks: bool = True, is_repeated: bool = False) -> TraceResult:
        settings = TraceSettings(leaf_modules, fake, left_behind, changed, rates, calls_hooks)
        with preserve_task(task):
            if fake:
                use_fake_tensors(task)
            # Read then: the tracer knows tensors by identity, and the step meets the fakes.
            with preserve_state(task, preceding, batch) as state_before:
                tracer = Tracer(task, copy_batch(batch), settings, before=state_before)
                result = record(tracer, counts_saved=counts_saved)
                second_tracer: Tracer | None = None
                if tracer.changes.read() or is_repeated:
                    # On the state that the first run left: a cache is filled once, a counter changes in every step.
                    with preserve_state(task) as state_between:
                        second_tracer = Tracer(task, copy_batch(batch), settings, before=state_between)
                        record(second_tracer, counts_saved=counts_saved)
                        # Before `finish`, which takes what only the first run changes for a cache.
                        tracer.changes.again = second_tracer.changes.written()
                        tracer.changes.used_again = second_tracer.used()
                        tracer.hazards.mutated_again = second_tracer.hazards.mutations()
                trace_result = tracer.finish(result)
                if second_tracer is not None and is_repeated:
                    second_tracer.compare(tracer, trace_result)
                return trace_result

    # A survey only weighs modules. It is not repeated, as a module that becomes one node may hide what differs.
    is_survey = not leaf_modules
    try:
        trace_result = run(is_repeated=not is_survey)
    except RuntimeError as error:
        # Transforms of torch.func do not work in hooks on saved tensors. Torch has no class for that error.
        if "support saved tensor hooks" not in str(error):
            raise
        trace_result = run(is_repeated=not is_survey, counts_saved=False)
    if trace_result.has_hooks:  # a stage that skips a module calls its hooks only if the step would fail without
        try:
            graph_without_hooks = run(counts_saved=False, calls_hooks=False).graph
            trace_result.graph.hooks_capture = _inputs(graph_without_hooks) != _inputs(trace_result.graph)
        except Exception:  # of any type: the step's own code misses what the hooks keep for it
            trace_result.graph.hooks_capture = True
    return trace_result


def _inputs(graph: TracedGraph) -> list[tuple[str, tuple[int, ...]]]:
    return [(node.name, node.inputs) for node in graph.nodes]


@dataclass(slots=True)
class TraceResult:
    """A graph, and the information from which other leaf modules are chosen."""

    graph: TracedGraph
    module_calls: dict[str, ModuleCall]
    opaque_leaf_modules: set[str]
    """Leaf modules whose result contains objects that cannot be sent to a later stage."""
    carrying_modules: set[str]
    """Leaf modules inside of which a tensor is made that later nodes use without being given it, as by a hook."""
    reading_modules: set[str]
    """Expanded modules whose own code reads elements of values that only one stage has."""
    has_hooks: bool
    """True if leaf modules have forward hooks."""
    left_behind: frozenset[str]
    """Attributes in which the step leaves tensors of one stage."""
    unsendable: list[Node]
    """Calls that read state of one stage and return what cannot be sent to the others, such as arrays."""
    refusal: str | None = None
    """The reason why the step cannot be partitioned with these leaf modules."""
    changed_calls: tuple[Node, Node] | None = None
    """The first call that the step makes when it is run for the first time, and the other one of the second time."""


CONSTANTS = (type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device, torch.Size, slice)

CARRIED = (
    " Return that tensor from the module's forward and pass it on as an argument, so that it can be sent from stage to "
    "stage."
)


@dataclass(frozen=True, slots=True)
class TraceSettings:
    """The arguments of `trace` that hold for each of its runs."""

    leaf_modules: frozenset[str]
    fake: bool
    left_behind: frozenset[str]
    changed: frozenset[str]
    rates: Rates
    calls_hooks: bool = True
    """False: a leaf module that has hooks runs without them."""


class Tracer(TracingMode):
    """Records one run of a step as a graph."""

    def __init__(self, task: nn.Module, batch: Any, settings: TraceSettings, *, before: PreservedState):
        super().__init__()
        self.batch = batch
        self._before, self._settings = before, settings
        self._names = StateNames(task, before, left_behind=settings.left_behind)
        self._hooks = _ForwardHooks(task)
        self.costs = ModuleCosts()
        self._task = task
        self.changes = StateChanges(task, before, self._position, elsewhere=settings.changed)
        self._writes: dict[int, list[str]] = {}  # by node, the state that it writes
        self._saved_state: dict[int, dict[str, bool]] = {}  # by node, what autograd saves for its backward
        self._carried: list[tuple[Tensor, CutConstraint]] = []  # tensors that a leaf module leaves for another call
        self._hook_calls, self._unsendable = list[Node](), list[Node]()  # the latter read state, but return no numbers
        self.hazards = Hazards({self._random_state()})
        # All parameters below a leaf module, used or not: for another batch its forward may take another branch.
        self._leaf_tensors = {
            name: ([id(parameter) for parameter in module.parameters()], list(module.buffers()))
            for name, module in task.named_modules()
            if name in settings.leaf_modules
        }
        self._nodes: list[Node] = []
        self._values = TracedValues(tensors(batch))
        # Weak, or the trace would keep every temporary of every module. An id may come back: compare the tensor too.
        self._made_inside: dict[int, tuple[weakref.ref[Tensor], int]] = {}
        self._num_codes = 0  # of all numbers that leaf modules returned
        self._constraints: list[CutConstraint] = []
        self._occurrences: dict[str, int] = {}
        self._node: Node | None = None
        self._in_call = False  # of torch, which the trace has seen
        self._unknown: dict[int, tuple[Tensor, Node]] = {}  # tensors that were there before, and others
        self._left_behind: list[weakref.ref[Tensor]] = []  # those that caches still hold in the second run are alive
        self._hidden = HiddenResults()
        self.costs.counter.before_write = self._before_write
        self.costs.counter.after_operation = self._after_operation
        self._callers = _Callers()
        self._opaque_leaf_modules: set[str] = set()
        self._lengths = _Lengths()
        for index, tensor in enumerate(self._values.kept):
            self._note_layout(index, tensor)

    # -- Calls

    def module_call(self, name: str, call: Call, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run a module: as one node if it is a leaf module, else as code whose calls are nodes."""
        module = self._task.get_submodule(name)
        has_hooks = self._hooks.note(name, module)
        with self.costs.inside(name):
            if self._node is not None or name not in self._settings.leaf_modules:
                return call(*args, **kwargs)
            if has_hooks:
                self._hooks.called.add(name)
            with without_hooks([module]) if has_hooks and not self._settings.calls_hooks else nullcontext():
                return self._record(name, call, args, kwargs, is_leaf_module=True)

    def opaque_call(self, name: str, call: Call, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run an opaque call as one node."""
        if self._in_call:  # part of that call, as the Function of an operator of torch.library
            return call(*args, **kwargs)
        return self._record(name, call, args, kwargs, is_opaque=True)

    def note_function(self, name: str) -> None:
        """Refuse a Function that runs in no call of the trace: a stage could begin inside, without its backward."""
        if not self._in_call:
            self.hazards.refuse(
                f"the step calls `{name}` (at {caller_location()}) by another name, which torch 2.14 and later ones "
                f"do not let a pipeline see. Write `{name}(...)` there.",
                self.costs.path[-1],
            )

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = super().__torch_function__(func, types, args, kwargs)
        # Who asks for a length that depends on elements may branch on it, so its module is kept whole. Torch's own
        # code asks for lengths too, which is no branch of the step.
        if self._node is None and self._lengths and function_name(func) in _SIZES and args[0] in self._lengths:
            caller: FrameType | None = sys._getframe(1)
            while caller is not None and caller.f_code.co_filename in _METHODS:  # `len` comes through Python code
                caller = caller.f_back
            if caller is not None and not caller.f_code.co_filename.startswith(_TORCH):
                self._lengths.asking.add(self.costs.path[-1])
        # Torch's own Python code reads it too, and is let through.
        reads_graph = self._node is None and result is not None and function_name(func) == "grad_fn"
        if reads_graph and not sys._getframe(1).f_code.co_filename.startswith(_TORCH):
            raise UserError(
                f"the step reads grad_fn of a tensor (at {caller_location()}), which other stages than the one that "
                "made it do not have. Register hooks on gradients by tensor.register_hook; other uses of the graph "
                "belong inside one module's forward."
            )
        return result

    def torch_call(self, name: str, call: Call, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run a torch function: as a node outside of leaf modules; inside one, to record the tensors it uses."""
        if self._node is not None:
            # The code of a module may use more than its arguments: parameters of others, and tensors in attributes.
            for tensor in tensors((args, kwargs)):
                self._use(self._node, tensor)
            result = call(*args, **kwargs)
            for tensor in tensors(result):
                self._made_inside[id(tensor)] = (weakref.ref(tensor), self._node.index)
            return result
        # No public function tells whether a transform is active, in which tensors are wrappers.
        if torch._C._are_functorch_transforms_active():
            raise UserError(
                f"the step calls `{name}` (at {caller_location()}) inside a transform of torch.func other than vmap, "
                "grad and grad_and_value, which cannot be partitioned. Call the transform inside one module's forward."
            )
        if name == "backward":
            raise UserError(
                f"the step calls `backward` itself (at {caller_location()}), but a pipeline runs backward from "
                "stage to stage. Return the loss from training_step, and trainkit runs backward."
            )
        return self._record(name, call, args, kwargs)

    def _record(
        self,
        name: str,
        call: Call,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        *,
        is_leaf_module: bool = False,
        is_opaque: bool = False,
    ) -> Any:
        argument_tensors = tensors((args, kwargs))
        # The last entry is the leaf module itself, and the one before it has the code that calls it.
        path, is_opaque = self.costs.path[-2 if is_leaf_module else -1], is_opaque or is_leaf_module
        node = Node(len(self._nodes), name, is_leaf_module, path, caller_location(), is_opaque)
        parameters, buffers = self._leaf_tensors[name] if is_leaf_module else ([], [])
        self._callers.locate(node)
        node.parameters = tuple(self._names.parameters[key] for key in parameters)
        node.buffers = tuple(self._names.buffers[id(buffer)] for buffer in buffers if id(buffer) in self._names.buffers)
        # An autograd Function has no buffers of its own, but its code may write to any.
        watched = [*argument_tensors, *(self._task.buffers() if is_opaque and not is_leaf_module else buffers)]
        versions = [version_of(tensor) for tensor in watched]
        # Apart from versions, which `detach_` and `requires_grad_` leave as they are.
        flags = [tensor.requires_grad for tensor in argument_tensors]
        # To read Python's and numpy's states copies their tables, so not for torch functions, which never draw there.
        random_state, python_state = self._random_state(), python_rng_state() if is_opaque else ()
        cost_before, num_shaped = self.costs.now(), self.costs.counter.num_shaped
        for tensor in argument_tensors:
            self._use(node, tensor)
        node.num_given = len(node.inputs)  # before the call, in which an opaque node uses more tensors
        outline_before = outline((args, kwargs)) if is_opaque else None
        if name in SIDE_EFFECTS:
            self._hook_calls.append(node)
        elif name == "data=":  # makes no operation that the counter could see
            self._before_write(argument_tensors[0])
        if is_opaque:
            self._node = node
        self._in_call = True
        try:
            result = call(*args, **kwargs)
        except Exception as error:  # if the step does not catch it, the trace ends here, and the refusal is not read
            self.hazards.refuse(f"{node} raises {type(error).__name__}, which the step catches.", path)
            raise
        finally:
            self._node, self._in_call = None, False
        if name == "__iter__":  # an iterator can be read once, and the step reads it too
            result = list(result)
        result_tensors = tensors(result)
        if not (argument_tensors or result_tensors or is_opaque):
            return result  # such as `torch.is_grad_enabled()`: not a node
        self.costs.add_since(cost_before, node.cost)
        random_state_after = self._random_state()
        node.is_random = random_state != random_state_after
        self._note_hazards(node, argument_tensors, outline_before != (outline((args, kwargs)) if is_opaque else None))
        self.hazards.check_seed(node, random_state, random_state_after)  # reads `is_random`
        node.draws_in_python = is_opaque and python_state != python_rng_state()
        written = [tensor for tensor, old in zip(watched, versions, strict=True) if version_of(tensor) != old]
        switched = [tensor for tensor, old in zip(argument_tensors, flags, strict=True) if tensor.requires_grad != old]
        self._complete(node, result, written, switched)
        if not is_opaque:
            self._lengths.note(
                argument_tensors, result_tensors, of_elements=self.costs.counter.num_shaped != num_shaped
            )
        node.reads = (
            not result_tensors and not written and not is_opaque and name not in SIDE_EFFECTS and not name.endswith("=")
        )
        if node.reads and (node.parameters or node.buffers):
            # After `_complete`, which has set the result of the node to constants.
            self._send_numbers(node, result)
        return iter(result) if name == "__iter__" else result

    def _note_hazards(self, node: Node, arguments: list[Tensor], changes_arguments: bool) -> None:
        if changes_arguments:
            self.hazards.mutated.append((node, "an argument"))
        if node.is_leaf_module and not _hooks(self._task.get_submodule(node.name)):  # what hooks keep has its own rule
            self.hazards.mutated += [(node, f"'{name}'") for name in self.changes.watch.changed_containers()]
        if node.name in ARRAYS and not self._settings.fake:
            for tensor in arguments:
                self.hazards.keep_array(node, tensor)

    def _send_numbers(self, node: Node, result: Any) -> None:
        """Let a node send the numbers that it reads from state of the task, which its stage alone may have."""
        if all(is_number(leaf) for leaf in tree_leaves(result)):
            node.result = tree_map(self._number, result)
            node.has_plain, node.reads = True, False
        elif not isinstance(result, str):
            self._unsendable.append(node)

    def _number(self, value: Any) -> ScalarValue:
        number = ScalarValue(type(value), self._num_codes, len(encoded(value)))
        self._num_codes += number.count
        return number

    def _position(self) -> tuple[int, str]:
        """Return the index of the present or next node, and the name of the leaf module that runs."""
        return (len(self._nodes), "") if self._node is None else (self._node.index, self._node.name)

    def _before_write(self, tensor: Tensor) -> None:
        """Keep the content of a tensor of the task that the present node is about to write."""
        # Private: torch has no public name for it. With function modes on, the copies would be calls of the step.
        with torch._C.DisableTorchFunction():
            for name in self._before.keep_before_write(tensor):
                written = self._writes.setdefault(self._position()[0], [])
                if name not in written:
                    written.append(name)

    def _after_operation(self, func: Any, arguments: Any, result: Any) -> None:
        """Keep what an operation has made of values of the step, if it is in no call that the trace has seen."""
        if self._in_call:
            return
        with torch._C.DisableTorchFunction():
            made, used = tensors(result), tensors(arguments)
            self._hidden.add(
                made,
                used,
                operation=str(func),
                location=caller_location(),
                values=self._values.indices(used),
                parameters=[
                    self._names.parameters[id(tensor)] for tensor in used if id(tensor) in self._names.parameters
                ],
            )

    def _random_state(self) -> bytes | int:
        """Return a state that differs after a call that drew random numbers."""
        if self._settings.fake:
            return self.costs.counter.num_draws  # random calls with fake tensors do not advance the generator
        # Private: no public context lifts modes. Under them `numpy`, which detaches, would be a call of the step.
        with torch._C.DisableTorchFunction(), torch._C._DisableTorchDispatch():
            return torch.get_rng_state().numpy().tobytes()

    # -- Inputs and outputs

    def _use(self, node: Node, tensor: Tensor) -> None:
        key = id(tensor)
        if key in self._names.parameters:
            node.parameters = with_item(node.parameters, self._names.parameters[key])
        elif key in self._names.buffers:
            node.buffers = with_item(node.buffers, self._names.buffers[key])
        elif (value := self._values.index(tensor)) is not None:
            node.inputs = with_item(node.inputs, value)
        elif key in self._names.of_another_phase:
            raise UserError(
                f"{node} uses a tensor that the step of another phase has left behind. It exists in one stage, for "
                "one micro-batch. Compute it again in this step, or type strategy=ddp."
            )
        elif key in self._names.attributes:
            node.buffers = with_item(node.buffers, self._names.attributes[key])
        elif hidden := self._hidden.used_by(node, tensor):
            for value in hidden.values:
                node.inputs = with_item(node.inputs, value)
            for name in hidden.parameters:
                node.parameters = with_item(node.parameters, name)
        elif key in self._made_inside:
            reference, first = self._made_inside[key]
            if reference() is tensor and first != node.index:
                reason = f"{node} uses a tensor made inside {self._nodes[first]}"
                self._carried.append((tensor, CutConstraint(first, node.index, reason, CARRIED)))
        elif self._node is None:
            self._unknown.setdefault(key, (tensor, node))

    def _complete(self, node: Node, result: Any, written: list[Tensor], switched: Sequence[Tensor] = ()) -> None:
        """Add a node with what it made, what it has `written`, and tensors whose `requires_grad` it has `switched`."""
        outputs: dict[int, bool] = {}
        node.result = tree_map(lambda leaf: self._traced_leaf(node, leaf, outputs), result)
        for tensor in switched:
            if (value := self._values.index(tensor)) is not None:
                outputs[value] = tensor.requires_grad
        node.written_buffers += tuple(self._writes.pop(node.index, ()))
        node.saved = tuple(self._saved_state.pop(node.index, ()))
        node.saved_memories = tuple(self._values.memories.saved.get(node.index, ()))
        for tensor in written:
            if (value := self._values.index(tensor)) is not None:
                # As it is now: a constant that a model value is written to needs a gradient from here on.
                outputs[value] = tensor.requires_grad
                node.written += (value,)
            self._values.note_write(tensor, node)
        node.has_plain = node.is_opaque and not all(
            isinstance(leaf, (ValueRef, ParameterRef)) for leaf in tree_leaves(node.result)
        )
        node.outputs = tuple(NodeOutput(value, requires_grad) for value, requires_grad in outputs.items())
        returned = {leaf.name for leaf in tree_leaves(node.result) if isinstance(leaf, ParameterRef)}
        if returned and not outputs:  # such as `weight.to(dtype)` that changes nothing: not a use of the weight
            node.parameters = tuple(name for name in node.parameters if name not in returned)
            node.buffers = tuple(name for name in node.buffers if name not in returned)
        occurrence = self._occurrences[node.name] = self._occurrences.get(node.name, -1) + 1
        # Not `hash`, which differs from process to process: all stages seed random calls by this key.
        node.key = zlib.crc32(f"{node.name}#{occurrence}".encode())
        self._nodes.append(node)

    def _traced_leaf(self, node: Node, leaf: Any, outputs: dict[int, bool]) -> Any:
        if not isinstance(leaf, Tensor):
            if node.is_opaque and is_number(leaf):
                return self._number(leaf)
            if isinstance(leaf, CONSTANTS):
                return leaf
            if node.is_leaf_module:
                self._opaque_leaf_modules.add(node.name)
                self.hazards.objects.append((node, type(leaf).__name__))
            elif node.is_opaque:
                raise UserError(
                    f"{node} returns a {type(leaf).__name__}, which cannot be sent to the other stages. Return tensors "
                    "and numbers from it, or call it inside one module's forward."
                )
            return Constant()
        name = self._names.parameters.get(id(leaf)) or self._names.buffers.get(id(leaf))
        if name is not None:
            return ParameterRef(name)
        value = self._values.index(leaf)
        if value is None:
            value = self._values.add(leaf, local=False)
            self._note_layout(value, leaf)
            outputs[value] = leaf.requires_grad
        return ValueRef(value)

    def _note_layout(self, value: int, tensor: Tensor) -> None:
        if tensor.layout is not torch.strided or tensor.is_nested:
            self.hazards.layouts[value] = tensor.layout

    # -- Costs

    def count_saved(self, tensor: Tensor) -> Tensor:
        """Count a tensor that autograd saves for backward, each memory once; that of parameters and buffers not."""
        index = self._position()[0]
        for name, _ in self._before.sharing(tensor):
            self._saved_state.setdefault(index, {})[name] = True
        if id(base_of(tensor)) not in self._names.parameters and id(base_of(tensor)) not in self._names.buffers:
            self.costs.counter.total.activation_bytes += self._values.memories.save(tensor, index)
        # Detached: the result of an operation that its own graph holds is a cycle, which nothing frees. Fake ones have
        # no memory, and to detach them takes a sixth of the trace. Private: with function modes on, what an autograd
        # Function saves would be a call of the step.
        with torch._C.DisableTorchFunction():
            return tensor.detach() if tensor.requires_grad and not self._settings.fake else tensor

    # -- Result

    def finish(self, result: Any) -> TraceResult:
        """Return the result of the trace; `result` is what the step returned. Called before the task is restored."""
        last = Node(len(self._nodes), RETURN, False, "", "the end of the step")
        for tensor in tensors(result):
            self._use(last, tensor)
        self._complete(last, None, [])
        self._callers.checkpoints.clear()  # a frame keeps all of its local variables alive
        self.hazards.check_arrays()
        # Before the marking, which takes state that no node writes for a constant.
        self.changes.add_to(
            self._nodes,
            use=self._use,
            is_value=lambda tensor: self._values.index(tensor) is not None,
            has_hooks=bool(self._hooks.called),
        )
        values, changes = self._values.all, self.changes
        mark_batch_only_nodes(self._nodes, values, changed=self._settings.changed, rates=self._settings.rates)
        if self._settings.leaf_modules:  # in a survey also those of scripted modules
            self._hidden.check_uses(values)
        # After the marking: it would take the numbers, a value that no node makes, for one of the batch.
        numbers = None
        if any(node.sends_numbers for node in self._nodes):
            numbers = len(values)
            values.append(Value((self._num_codes,), torch.int64, local=False))
        carried = [constraint for tensor, constraint in self._carried if id(tensor) not in changes.cached]
        carried_attributes = {
            changes.attribute_with[id(tensor)]: (constraint.first, tensor.shape, tensor.dtype)
            for tensor, constraint in self._carried
            if id(tensor) in changes.attribute_with and id(tensor) not in changes.cached
        }
        self._constraints += carried
        # One reason for a range is enough.
        carried_ranges = {(constraint.first, constraint.last) for constraint in self._constraints}
        write_constraints = written_buffer_constraints(self._nodes, changes.kind_of)
        self._constraints += [group for group in write_constraints if (group.first, group.last) not in carried_ranges]
        self._constraints += self._hook_constraints()
        self._constraints = list(dict.fromkeys(self._constraints))
        self._constraints += alias_constraints(self._nodes, self._values.written_alias_sets)
        self._constraints += gradient_constraints(self._nodes)
        attribute_labels = {f"'{name}'" for name in changes.changed}  # `add_to` has rules for these
        self.hazards.mutated = [(node, name) for node, name in self.hazards.mutated if name not in attribute_labels]
        self._constraints += self.hazards.constraints(self._nodes, values)
        self._constraints += parameter_hook_constraints(self._task, self._nodes)
        self._constraints += checkpoint_constraints(self._nodes)
        graph = TracedGraph(
            self._nodes,
            values,
            self._constraints,
            {name: num_bytes(parameter) for name, parameter in self._task.named_parameters()},
            numbers,
            calls_compiled=self._callers.compiled,
            temporary_hooks=self._hooks.temporary(self._task),
            replaced=frozenset(changes.changed),
            handed_on=tuple(changes.handed_on),
            reset=changes.reset,
            left_in=carried_attributes,
            memory_bytes=tuple(self._values.memories.sizes),
        )
        reading_paths = [node.path for node in self._nodes if not node.is_batch_only and node.reads]
        reading_modules = {
            *reading_paths,
            *self._lengths.asking,
            *changes.watch.drawing,
            *dict(self.hazards.refused),
        } - {""}
        unsendable = [node for node in self._unsendable if not node.is_batch_only]
        phase_leaks = frozenset(name for name in changes.again if self._is_of_one_stage(name))
        # Weak from here on: `compare` looks only for tensors that the second run holds too.
        self._left_behind = [weakref.ref(tensor) for tensor in (*self._values.kept, *self._hidden.release())]
        self._left_behind += [reference for reference, _ in self._made_inside.values()]
        self._values.kept.clear()
        return TraceResult(
            graph,
            self.costs.calls,
            self._opaque_leaf_modules,
            {self._nodes[group.first].name for group in carried} & self._settings.leaf_modules,
            reading_modules,
            bool(self._hooks.called),
            phase_leaks,
            unsendable,
            next((reason for _, reason in self.hazards.refused), None),
        )

    def compare(self, first: Tracer, found: TraceResult) -> None:
        """Add to `found`, the result of the `first` run, what this second one does otherwise.

        Raises UserError for a tensor that was not there before and that no call has made.
        """
        # Tensors without a maker are constants if both runs use the same ones. The list keeps the ids valid.
        surviving_tensors = [reference() for reference in first._left_behind]
        known_ids = {*first._unknown, *(id(tensor) for tensor in surviving_tensors if tensor is not None)}
        for key, (_, node) in self._unknown.items():
            if key not in known_ids:
                raise UserError(
                    f"{node} uses a tensor that none of the calls which a trace sees has made, such as one that "
                    "another thread computes. In other stages it would be computed from placeholders. Compute it in "
                    "the step's own thread, or inside one module's forward."
                )
        end = Node(len(self._nodes), RETURN, False, "", "the end of the step")
        # Not strict: the `return` of the shorter run differs from the call of the longer one there.
        for first_node, second_node in zip(first._nodes, [*self._nodes, end], strict=False):
            if first_node.name != second_node.name:
                found.changed_calls = first_node, second_node
                return

    def used(self) -> set[str]:
        """Return the names of the buffers, and of the attributes whose tensors of before the step used."""
        return {name for node in self._nodes for name in node.buffers}

    def _is_of_one_stage(self, name: str) -> bool:
        """Return True for an attribute in which the step leaves a tensor that depends on the model."""
        values = self._values.indices(self.changes.changed.get(name, ()))
        is_buffer = self.changes.kind_of(name) == "buffer"
        return not is_buffer and any(not self._values.all[value].local for value in values)

    def _hook_constraints(self) -> Iterator[CutConstraint]:
        """Yield constraints around the nodes whose gradients a hook sees, and the node that sets it."""
        makers = {output.value: node for node in reversed(self._nodes) for output in node.outputs}
        for node in self._hook_calls:
            users = [makers[value] for value in node.inputs if value in makers and not self._values.all[value].local]
            users += [user for user in self._nodes if set(user.parameters) & set(node.parameters)]
            indices = [node.index, *(user.index for user in users)]
            if min(indices) < max(indices):
                reason = f"{node} sets a hook on the gradient of a tensor of {self._nodes[min(indices)]}"
                advice = " Set it in the module that makes the tensor, or where that module is called."
                yield CutConstraint(min(indices), max(indices), reason, advice)


class _Callers:
    """The frames around the calls of a step: torch's activation checkpoints, and compiled functions."""

    def __init__(self) -> None:
        self.checkpoints: dict[FrameType, int] = {}  # kept, so that no other frame has the same identity
        self.compiled = False

    def locate(self, node: Node) -> None:
        """Set the outermost checkpoint around the present call of the step; note compiled functions."""
        # The outermost: backward runs all of its calls again, also those of inner checkpoints.
        outermost: FrameType | None = None
        frame: FrameType | None = sys._getframe(1)
        while frame is not None:
            if frame.f_code.co_filename == _CHECKPOINT and frame.f_code.co_name == "checkpoint":
                outermost = frame
            self.compiled |= frame.f_code.co_filename == _COMPILED and frame.f_code.co_name == "compile_wrapper"
            frame = frame.f_back
        if outermost is not None:
            node.checkpoint = self.checkpoints.setdefault(outermost, len(self.checkpoints))


class _Lengths:
    """The tensors of a step whose length depends on elements, and the modules whose own code asks for one."""

    def __init__(self) -> None:
        self._of: dict[int, int] = {}  # by identity
        self.asking: set[str] = set()

    def __bool__(self) -> bool:
        return bool(self._of)

    def __contains__(self, tensor: Tensor) -> bool:
        return id(tensor) in self._of

    def note(self, arguments: Sequence[Tensor], results: Sequence[Tensor], *, of_elements: bool) -> None:
        """Note the results of a call, all of them if it makes a shape of elements."""
        # What has the length of an argument whose length depends on elements is taken to depend on them too.
        lengths = {self._of[id(tensor)] for tensor in arguments if tensor in self}
        for tensor in results:
            if tensor.dim() and (of_elements or len(tensor) in lengths):
                self._of[id(tensor)] = len(tensor)


class _ForwardHooks:
    """The forward hooks of a task's modules: which leaf modules call some, and which ones the step registers."""

    def __init__(self, task: nn.Module) -> None:
        self._before = {name: _hooks(module) for name, module in task.named_modules()}
        self._new: dict[str, set[int]] = {}
        self.called: set[str] = set()

    def note(self, name: str, module: nn.Module) -> bool:
        """Note the hooks of a module that is called, and return True if it has any."""
        hooks = _hooks(module)
        if hooks:
            self._new.setdefault(name, set()).update(hooks - self._before[name])
        return bool(hooks)

    def temporary(self, task: nn.Module) -> frozenset[str]:
        """Return the modules with hooks that the step has registered, and removed again."""
        return frozenset(name for name, hooks in self._new.items() if hooks - _hooks(task.get_submodule(name)))


def _hooks(module: nn.Module) -> set[int]:
    """Return the ids of a module's forward hooks."""
    # Private: torch lists hooks nowhere else. Their ids count up in a process: no two hooks have the same.
    return {*module._forward_pre_hooks, *module._forward_hooks}


_SIZES = frozenset(("__len__", "shape", "size", "numel", "nelement"))
"""Calls that return the length of a tensor."""


# With a separator at the end, or torchvision would be taken for torch.
_HERE, _TORCH = (str(folder / "_")[:-1] for folder in (Path(__file__).parents[1], Path(torch.__file__).parent))
_METHODS = tuple(str(Path(_TORCH) / name) for name in ("_tensor.py", "overrides.py"))
_CHECKPOINT = str(Path(_TORCH) / "utils" / "checkpoint.py")
_COMPILED = str(Path(_TORCH) / "_dynamo" / "eval_frame.py")


def caller_location() -> str:
    """Return `file:line` of the innermost call outside of torch and this package."""
    # Not `inspect.stack`, which reads source files: this runs at every call of the step.
    frame = sys._getframe(1)
    while frame.f_back is not None:
        name = frame.f_code.co_filename
        if not name.startswith((_HERE, _TORCH)) and os.path.basename(name) != "contextlib.py":
            return f"{os.path.basename(name)}:{frame.f_lineno}"
        frame = frame.f_back
    return "an unknown place"
