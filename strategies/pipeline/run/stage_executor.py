"""Stage executor: runs the user's step and executes the nodes of one stage."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from traceback import walk_tb
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import _get_current_function_mode

from trainkit.devices import seed_device
from trainkit.errors import UserError
from trainkit.metrics.sync import metrics_in
from trainkit.optim.precision import Precision
from trainkit.rng import seed_python, seeded_python
from trainkit.strategy import named_state
from trainkit.tree import tree_map

from ..plan.stage import StageGraph, stage_graphs
from ..trace.attributes import StageAttributes, Table, place_of
from ..trace.graph import (
    RETURN,
    Call,
    Constant,
    Node,
    ParameterRef,
    ScalarValue,
    Signature,
    Step,
    TracedGraph,
    ValueRef,
    changed,
    decoded,
    tensors,
)
from ..trace.interceptor import ModuleInterceptor, TracingMode, same_hooks

Shapes = list[tuple[int, ...] | None]
"""Shape of each value of a step; `None` where it is not known yet."""
Recorder = Callable[[int, Node, Any, Any], None]
"""Called with the seed of the micro-batch, a node, its arguments and its result."""


class TraceMismatchError(UserError):
    """The step did not make the calls of the traced step."""


class _StageFinished(BaseException):
    """Ends a step after the stage's last node; a user's `except Exception` does not catch it."""


class StageExecutor:
    """Executor of the stages of one traced step, whose leaf modules are intercepted.

    `stage_graphs` are the stages on all ranks, `traced` is the signature of the traced batch, and `device` that of this
    rank. `attributes` are those of each stage, if a rank has several.
    """

    def __init__(
        self,
        graph: TracedGraph,
        task: nn.Module,
        stage_graphs: list[StageGraph],
        *,
        traced: Signature,
        device: torch.device,
        attributes: StageAttributes | None = None,
        trains_all: bool = False,
    ):
        traced_shapes: Shapes = [value.shape for value in graph.values]
        self.graph = graph
        self.stage_graphs = stage_graphs
        self.shapes = {(stage_graph.index, traced): traced_shapes for stage_graph in stage_graphs}
        """By stage and signature of a batch; the shapes of other batches are added when they come."""
        self.interceptor = ModuleInterceptor(task, graph.leaf_modules)
        self.device = device
        self.checkpoint_starts = _checkpoint_starts(graph.nodes)
        """For each node: true if a checkpoint begins with it that draws random numbers."""
        # By place, not by tensor: the step may assign another tensor to a buffer.
        self._places = {name: place_of(task, name) for name in named_state(task)}
        self.shares_ranks = len({stage_graph.rank for stage_graph in stage_graphs}) < len(stage_graphs)
        """True if a rank has several stages."""
        self.writes_batch = any(graph.values[value].local for node in graph.nodes for value in node.written)
        """True if the step writes to its batch, or to what it makes of that alone."""
        self._left_in = [
            (
                [node.index for node in graph.nodes if node.name == graph.nodes[first].name],  # calls of the module
                place_of(task, name),
                torch.zeros((), dtype=dtype, device=device).expand(shape),  # one element in memory
            )
            for name, (first, shape, dtype) in graph.left_in.items()
        ]
        self._attributes = attributes
        self._trains_all = trains_all  # and not only the parameters of a phase
        self._reset = [place_of(task, name) for name in graph.reset]
        written = [name for name in sorted(graph.written) if _is_saved_before_write(graph, task, name)]
        self._written = [place_of(task, name) for name in written]
        self._traced = traced
        self.recorder: Recorder | None = None
        """Called with each node that was executed while a step is verified."""
        self._temporarily_hooked = [task.get_submodule(name) for name in graph.temporary_hooks]
        self._metrics = metrics_in(task)
        self._placeholders: dict[tuple[int, tuple[int, ...]], Tensor] = {}

    def run(
        self,
        stage_graph: StageGraph,
        step: Step,
        batch: Any,
        *,
        received: Mapping[int, Tensor],
        shapes: Shapes,
        seed: int,
    ) -> tuple[Any, dict[int, Tensor]]:
        """Run `step` up to the end of the stage; the interceptor must be installed.

        Returns what the step returned, in the last stage, and the values that were received or are to be sent.
        `shapes` are those of all values for a batch of this signature; what the stage makes must have them, and those
        that are unknown are added. Random nodes draw from generators seeded by `seed` and their names.
        """
        if stage_graph.start == stage_graph.stop:  # this phase has no node here; the stage passes numbers on
            _add_unknown(shapes, {value: tuple(tensor.shape) for value, tensor in received.items()})
            return None, dict(received)
        interpreter = _StageInterpreter(self, stage_graph, received, shapes, seed)
        # Every stage runs the step's own code from its beginning, and its draws must be the same in each of them.
        seed_python(seed)
        checked = _checked_metrics(self._metrics, interpreter) if stage_graph.is_last else nullcontext()
        attributes = self._attributes.of_stage(stage_graph.index) if self._attributes is not None else nullcontext()
        saved = _saved_before_writes(self._written) if self._written else nullcontext()
        placeholders = self._left_by_others(interpreter.executes)
        # The interpreter is innermost, since only the current function mode can be left for a leaf module.
        with saved, self.interceptor.handled_by(interpreter), checked, attributes, placeholders, interpreter:
            reset_values = [(table, key, table.get(key)) for table, key in self._reset]
            try:
                with same_hooks(self._temporarily_hooked):  # which the step cannot remove where it ends early
                    returned = step(batch)
            except _StageFinished:
                returned = None
                # What the step itself restores at its end, which this stage does not reach.
                for table, key, value in reset_values:
                    table[key] = value
                for parameter, requires_grad in interpreter.requires_grad.items():
                    parameter.requires_grad_(requires_grad)
            except Exception as error:
                # Of an error inside a call that this stage executes, placeholders are not the cause.
                if len(self.stage_graphs) > 1 and not isinstance(error, UserError) and not _is_of_a_call(error):
                    error.add_note(_OF_PLACEHOLDERS)
                raise
            else:
                interpreter.check_end()
                if self._trains_all and interpreter.requires_grad:  # few steps change it: this is in every micro-batch
                    self._check_not_unfrozen(interpreter.requires_grad)
        if self.graph.numbers is not None:
            numbers = torch.tensor(interpreter.numbers, dtype=torch.int64, device=self.device)
            interpreter.values[self.graph.numbers] = numbers
            interpreter.made[self.graph.numbers] = tuple(numbers.shape)
        _add_unknown(shapes, interpreter.made)
        return returned, interpreter.values

    @contextmanager
    def _left_by_others(self, executes: Sequence[bool]) -> Iterator[None]:
        """Have placeholders in the attributes in which leaf modules of other stages leave tensors.

        The calls that use them are skipped, but the code of the step must find tensors.
        """
        filled = []
        for calls, (table, key), placeholder in self._left_in:
            is_of_others = not any(executes[call] for call in calls if call < len(executes))
            if is_of_others and not isinstance(table.get(key), Tensor):
                filled.append((table, {key: table[key]} if key in table else {}, key, placeholder))
                table[key] = placeholder
        try:
            yield
        finally:
            for table, former_item, key, placeholder in filled:
                if table.get(key) is placeholder:  # else the step has assigned something of its own
                    del table[key]
                    table.update(former_item)

    def _check_not_unfrozen(self, former: Mapping[nn.Parameter, bool]) -> None:
        """Raise UserError if the step has left a parameter unfrozen, for which its stage computes no gradient.

        `former` has `requires_grad` as it was before the step, of the parameters for which the step has set it.
        """
        for name, (table, key) in self._places.items():
            parameter = table.get(key)
            if isinstance(parameter, nn.Parameter) and not former.get(parameter, True) and parameter.requires_grad:
                raise UserError(
                    f"the step has unfrozen {name}, which strategy=pipeline does not support in a step. Unfreeze it in "
                    "a callback's on_step_end or on_fit_start, or set strategy=single."
                )

    def as_one_stage(self, task: nn.Module, *, rank: int) -> StageExecutor:
        """Return the executor of the whole step as one stage, on `rank`."""
        stages = stage_graphs(self.graph, [(0, len(self.graph.nodes))], [rank])
        return StageExecutor(self.graph, task, stages, traced=self._traced, device=self.device)

    def writes(self, node: Node) -> bool:
        """Return True for a node that writes to parameters or buffers, as the hooks of spectral norms do."""
        return any(name in self._places for name in node.written_buffers)

    def tensor(self, name: str) -> Any:
        """Return the present tensor of a parameter or buffer, which the step may replace."""
        table, key = self._places[name]
        return table[key]

    def may_be_written(self, tensor: Tensor) -> bool:
        """Return True for a tensor that a later micro-batch may write to: one written before, or state of the task."""
        if tensor.is_inference() or tensor._version:  # tensors of inference mode count no writes
            return True
        # State that only a later micro-batch writes to has version 0 until then.
        return bool(self._written) and _memory(tensor) in _memories(self._written)

    def placeholder(self, value: int, shape: tuple[int, ...]) -> Tensor:
        """Return a tensor with the shape and dtype of a value, but only one element in memory."""
        # Kept: each skipped call of every micro-batch needs one.
        key = (value, shape)
        if key not in self._placeholders:
            dtype = self.graph.values[value].dtype
            self._placeholders[key] = torch.zeros((), dtype=dtype, device=self.device).expand(shape)
        return self._placeholders[key]

    def seed(self, seed: int, node: Node) -> None:
        """Seed torch's generators for one node of one micro-batch."""
        node_seed = _mixed(seed, node)
        # Not `torch.manual_seed`, which seeds all devices: only the generators of this rank's are restored.
        torch.default_generator.manual_seed(node_seed)
        seed_device(self.device, node_seed)


def _add_unknown(shapes: Shapes, new_shapes: Mapping[int, tuple[int, ...]]) -> None:
    for value, shape in new_shapes.items():
        if shapes[value] is None:  # a known one stays: stages must agree on the sizes of messages
            shapes[value] = shape


def in_precision(precision: Precision, step: Step) -> Step:
    """Return a step that runs in the forward context of `precision`."""

    def run(batch: Any) -> Any:
        with precision.forward():
            return step(batch)

    return run


_OF_PLACEHOLDERS = (
    "The step's own code raised this. In a pipeline it has placeholders for the values of other stages: if "
    "strategy=single does not raise it, put that code inside one module's forward, or type strategy=ddp."
)


def _is_of_a_call(error: Exception) -> bool:
    """Return True if a call that a stage executes has raised the error."""
    # The traceback has the frame also where the user's code catches the error and raises it again.
    execute = _StageInterpreter._execute.__code__
    return any(frame.f_code is execute for frame, _ in walk_tb(error.__traceback__))


def _mixed(seed: int, node: Node) -> int:
    # Large odd factors (of the golden ratio and of splitmix64) keep apart the seeds of near micro-batches and nodes.
    # Any others would do, but a change of them changes every run. `manual_seed` takes at most 64 bits.
    return (seed * 0x9E3779B97F4A7C15 + node.key * 0xBF58476D1CE4E5B9) % 2**63


def _checkpoint_starts(nodes: list[Node]) -> list[bool]:
    random_ones = {node.checkpoint for node in nodes if node.is_random and node.checkpoint is not None}
    seen: set[int | None] = {None}
    starts = []
    for node in nodes:
        starts.append(node.checkpoint in random_ones and node.checkpoint not in seen)
        seen.add(node.checkpoint)
    return starts


def _is_saved_before_write(graph: TracedGraph, task: nn.Module, name: str) -> bool:
    """Return True for state of which backward needs the value that it had in the forward.

    Of the statistics of batch normalization it does not, if they are those that the same call writes.
    """
    if any(name in node.saved and name not in node.written_buffers for node in graph.nodes):
        return True
    # Private: torch has no public base class of all batch and instance normalizations.
    return not isinstance(task.get_submodule(name.rpartition(".")[0]), nn.modules.batchnorm._NormBase)


def _saved_before_writes(written: Sequence[tuple[Table, str]]) -> AbstractContextManager[Any]:
    """Return a context in which backward keeps copies of these tensors: the next micro-batch writes to them before."""
    memories = _memories(written)

    def save(tensor: Tensor) -> Tensor:
        with torch._C.DisableTorchFunction():  # an autograd Function saves while the calls of the step are followed
            if _memory(tensor) in memories:
                return tensor.detach().clone()
            # Or the result of an operation would be held by its own graph: a cycle, if backward does not run.
            return tensor.detach() if tensor.requires_grad else tensor

    return torch.autograd.graph.saved_tensors_hooks(save, lambda saved: saved)


def _memories(places: Sequence[tuple[Table, str]]) -> set[int | None]:
    present = [table.get(key) for table, key in places]
    return {_memory(tensor) for tensor in present if isinstance(tensor, Tensor)} - {None}


def _memory(tensor: Tensor) -> int | None:
    """Return the identity of a tensor's memory; `None` for a sparse one, which has several."""
    # Private: the public `data_ptr()` is 0 for every tensor that is empty or on the meta device.
    return tensor.untyped_storage()._cdata if tensor.layout is torch.strided else None


class _StageInterpreter(TracingMode):
    """One run of a step, node by node."""

    def __init__(
        self,
        executor: StageExecutor,
        stage_graph: StageGraph,
        received: Mapping[int, Tensor],
        shapes: Shapes,
        seed: int,
    ):
        super().__init__()
        self.values: dict[int, Tensor] = dict(received)
        """What was received, what is to be sent, and what skipped calls return: others are not kept."""
        self.made = {value: tuple(tensor.shape) for value, tensor in received.items()}
        """The shape of every value that was received or made."""
        self._sent = {transfer.value for transfer in stage_graph.sends}
        self.executes = stage_graph.executes
        self.position = 0
        """Index of the next node."""
        self.numbers: list[int] = []
        """The numbers that leaf modules have returned in this stage and earlier ones; 0 where none has come yet."""
        graph = executor.graph
        self.meets_compiled = graph.calls_compiled
        if graph.numbers is not None:
            codes = received.get(graph.numbers)
            # Waits for the device: the step's own code computes with these numbers.
            self.numbers = [0] * graph.values[graph.numbers].shape[0] if codes is None else codes.tolist()
        self._executor = executor
        self._nodes = graph.nodes
        self._starts = executor.checkpoint_starts
        self._stage_graph = stage_graph
        self._shapes = shapes
        self._seed = seed
        self._inside = False  # of a call, whose own torch calls are not nodes
        self._seed_checkpoint(0)

    def module_call(self, name: str, call: Call, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Execute or skip a leaf module."""
        self._stop_behind_the_stage()
        node = self._expect(name)
        if not self.executes[node.index]:
            result = self._skip(node)
            if node.is_leaf_module and self._executor.graph.hooks_capture and not self._executor.writes(node):
                self._call_hooks(self._executor.interceptor.modules[name], args, kwargs, result)
            return self._end(node, result)
        with self._executor.interceptor.handled_by(None):
            if _get_current_function_mode() is not self:  # a mode of the user is above this one: it cannot be left
                self._inside = True
                try:
                    return self._end(node, self._execute(node, call, args, kwargs))
                finally:
                    self._inside = False
            self.__exit__(None, None, None)  # so that torch calls inside the leaf module cost nothing
            try:
                result = self._execute(node, call, args, kwargs)
            finally:
                self.__enter__()
        return self._end(node, result)

    def _call_hooks(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
        """Call the forward hooks of a skipped module, which keep its result or placeholders for the step."""
        outer, self._inside = self._inside, True
        try:
            with self._executor.interceptor.handled_by(None):
                # Private: torch calls them only within a call of the module. A list, as a hook may remove itself.
                for key, hook in list(module._forward_pre_hooks.items()):
                    with_kwargs = (kwargs,) if key in module._forward_pre_hooks_with_kwargs else ()
                    hook(module, args, *with_kwargs)
                for key, hook in list(module._forward_hooks.items()):
                    with_kwargs = (kwargs,) if key in module._forward_hooks_with_kwargs else ()
                    hook(module, args, *with_kwargs, result)
        finally:
            self._inside = outer

    def torch_call(self, name: str, call: Call, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Execute or skip a torch function between leaf modules."""
        if self._inside:
            return call(*args, **kwargs)
        if self.position >= len(self._nodes) or self._nodes[self.position].name != name:
            if not tensors((args, kwargs)):
                result = call(*args, **kwargs)
                if not tensors(result):
                    return result  # such as `torch.is_grad_enabled()`: not a node
            # After the stage any call ends the step, also one that was not traced: the stage that makes it raises.
            self._stop_behind_the_stage()
            raise self._mismatch(f"called `{name}`")
        self._stop_behind_the_stage()
        node = self._expect(name)
        if not self.executes[node.index]:
            return self._end(node, self._skip(node))
        self._inside = True
        try:
            result = self._execute(node, call, args, kwargs)
        finally:
            self._inside = False
        return self._end(node, result)

    def opaque_call(self, name: str, call: Call, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Execute or skip an opaque call; one inside a torch call is part of that, as in the trace."""
        return call(*args, **kwargs) if self._inside else self.module_call(name, call, args, kwargs)

    def check_end(self) -> None:
        """Raise TraceMismatchError unless the step has ended where the traced step ends."""
        if self._nodes[self.position].name != RETURN:
            raise self._mismatch("ended")

    def _expect(self, name: str) -> Node:
        node = self._nodes[min(self.position, len(self._nodes) - 1)]
        if node.name != name:
            raise self._mismatch(f"called '{name}'")
        self.position += 1
        return node

    def _stop_behind_the_stage(self) -> None:
        """End the step at the call that follows the stage's last node.

        Not at once after the node: hooks, checkpoints and context managers around it must still complete.
        """
        if self.position == self._stage_graph.stop and not self._stage_graph.is_last:
            raise _StageFinished

    def _end(self, node: Node, result: Any) -> Any:
        self._seed_checkpoint(node.index + 1)
        return result

    def _seed_checkpoint(self, start: int) -> None:
        """Seed the generators if a checkpoint with random nodes begins with the node `start`.

        A checkpoint keeps the generators' state of its beginning and runs its calls again from there, so nothing in
        it is seeded again.
        """
        if self._starts[start]:
            self._executor.seed(self._seed, self._nodes[start])

    def _execute(self, node: Node, call: Call, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        # By the node, not in sequence: skipped calls draw nothing, so the generators of stages are at different points.
        if node.is_random and node.checkpoint is None:
            self._executor.seed(self._seed, node)
        if node.index in self._stage_graph.given:
            self._check_given(node, tensors((args, kwargs)))
        if node.draws_in_python:
            with seeded_python(_mixed(self._seed, node)):
                result = call(*args, **kwargs)
        else:
            result = call(*args, **kwargs)
        if node.name == "__iter__":
            result = list(result)  # what follows reads the tensors, and would use the iterator up
        if node.has_plain:
            self._record_numbers(node, result)
        if self._executor.recorder is not None:
            self._executor.recorder(self._seed, node, (args, kwargs), result)
        if node.index in self._stage_graph.made_by:
            self._record_values(node, [result] if isinstance(result, Tensor) else tensors(result))
        return iter(result) if node.name == "__iter__" else result

    def _check_given(self, node: Node, arguments: list[Tensor]) -> None:
        """Raise TraceMismatchError unless the arguments of the call include what this stage received for it."""
        # By identity: a tensor of another micro-batch may be equal in all else. `arguments` keeps the ids valid.
        identities = {id(tensor) for tensor in arguments}
        for value in self._stage_graph.given[node.index]:
            if id(self.values[value]) not in identities:
                maker = next((n for n in self._nodes if any(out.value == value for out in n.outputs)), "the batch")
                raise TraceMismatchError(
                    f"{node} was given another tensor than the one that {maker} made. An attribute carries "
                    "it past the step, and that does not happen in this stage. Return the tensor from the module's "
                    "forward, and use what the call returns."
                )

    def _record_numbers(self, node: Node, result: Any) -> None:
        try:
            for number, codes in changed(node, result):
                self.numbers[number.start : number.start + number.count] = codes
        except ValueError as error:
            raise TraceMismatchError(
                f"{node} has {error}, and the other stages would not know. Return the same structure for every "
                "batch, with what changes in tensors or numbers, or train with strategy=ddp."
            ) from None

    def _record_values(self, node: Node, made: list[Tensor]) -> None:
        count, positions = self._stage_graph.made_by[node.index]
        if len(made) != count:
            raise TraceMismatchError(
                f"{node} has {len(made)} tensors in its result, and the traced step has {count} there. Return the "
                "same structure for every batch, or train with strategy=ddp."
            )
        for position, value in positions:
            tensor = made[position]
            shape = self._shapes[value]
            if shape is not None and not self._stage_graph.is_last and tensor.shape != shape:
                raise TraceMismatchError(
                    f"{node} made a tensor of shape {tuple(tensor.shape)} where {shape} was expected "
                    "for a batch like this: its shape depends on the values, and the next stage cannot know it. Move "
                    "what depends on values into one module's forward, or begin no stage between them."
                )
            self.made[value] = tuple(tensor.shape)
            if node.is_batch_only or value in self._sent:
                self.values[value] = tensor

    def _skip(self, node: Node) -> Any:
        if isinstance(node.result, ValueRef):
            return self._look_up(node.result)
        result = tree_map(self._look_up, node.result)
        return iter(result) if node.name == "__iter__" else result

    def _look_up(self, leaf: Any) -> Any:
        if isinstance(leaf, ValueRef):
            tensor = self.values.get(leaf.value)
            if tensor is not None:
                return tensor
            shape = self._shapes[leaf.value]
            assert shape is not None, f"the shape of value {leaf.value} was not sent"
            outer, self._inside = self._inside, True  # the calls that make a placeholder are not nodes
            try:
                return self._executor.placeholder(leaf.value, shape)
            finally:
                self._inside = outer
        if isinstance(leaf, ScalarValue):
            return decoded(leaf, self.numbers)
        if isinstance(leaf, ParameterRef):
            return self._executor.tensor(leaf.name)
        # A `Constant` is an object that only the stage of its call has: nothing stands for it elsewhere.
        return None if isinstance(leaf, Constant) else leaf

    def _mismatch(self, done: str) -> TraceMismatchError:
        expected = self._nodes[min(self.position, len(self._nodes) - 1)]
        return TraceMismatchError(
            f"the step {done}, but the traced step calls {expected} here. A pipeline needs a step that makes the "
            "same calls for every batch. Move the branch into one module's forward, which may run any code; if it is "
            "in a model of transformers, give it masks of attention with 4 dimensions, as in docs/integrations.md; or "
            "train with strategy=ddp."
        )


@contextmanager
def _checked_metrics(metrics: Sequence[nn.Module], interpreter: _StageInterpreter) -> Iterator[None]:
    """Raise UserError in this context if a metric is updated by calls of which this stage does not execute all.

    The results of the others are placeholders here, and would be counted.
    """
    # In the instance, as torchmetrics does: a class may have other metrics, which are not checked.
    instance_updates = [(metric, vars(metric).get("update")) for metric in metrics]
    for metric in metrics:
        vars(metric)["update"] = _checked_update(metric, interpreter)
    try:
        yield
    finally:
        for metric, update in instance_updates:
            if update is None:
                del vars(metric)["update"]
            else:
                vars(metric)["update"] = update


def _checked_update(metric: nn.Module, interpreter: _StageInterpreter) -> Callable[..., Any]:
    update: Callable[..., Any] = metric.update  # type: ignore[assignment]

    def checked_update(*args: Any, **kwargs: Any) -> Any:
        first = interpreter.position
        result = update(*args, **kwargs)
        if not all(interpreter.executes[first : interpreter.position]):
            raise UserError(
                f"the metric {type(metric).__name__} is updated by calls of which an earlier stage than the last makes "
                "some. Update metrics at the end of the step, after the loss, and begin the last stage before that: "
                "strategy.split_points=[name_of_a_module]."
            )
        return result

    return checked_update
