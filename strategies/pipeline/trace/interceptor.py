"""The calls of a step: those of torch, of chosen modules, and those that function modes do not see."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import partial
from inspect import isbuiltin
from threading import get_ident
from typing import Any

import torch
import torch._functorch.apis as function_transforms
from torch import nn
from torch._functorch import eager_transforms
from torch.autograd.function import BackwardCFunction, Function, _SingleLevelFunction
from torch.overrides import TorchFunctionMode

from .graph import GRADIENT, Call

# fmt: off
METADATA = frozenset((
    "shape", "dtype", "device", "ndim", "requires_grad", "is_leaf", "layout", "is_cuda", "is_cpu", "is_meta",
    "is_sparse", "is_sparse_csr", "is_quantized", "is_mps", "is_xla", "is_xpu", "is_nested", "is_mkldnn",
    "is_vulkan", "is_ipu", "is_maia", "is_mtia", "itemsize", "nbytes", "names", "_version", "grad_fn", "_base",
    "_is_view", "_backward_hooks", "_post_accumulate_grad_hooks", "grad", "_grad", "size", "dim", "ndimension",
    "numel", "nelement", "stride", "storage_offset", "is_contiguous", "is_floating_point", "is_complex",
    "is_signed", "is_conj", "is_neg", "is_inference", "element_size", "get_device", "__len__", "__hash__",
    "data_ptr", "storage", "untyped_storage", "_typed_storage", "is_same_size", "is_shared", "is_pinned",
    "is_coalesced", "has_names", "is_tensor", "result_type", "promote_types", "can_cast", "output_nr",
    "retains_grad", "dense_dim", "sparse_dim", "volatile", "is_distributed", "dim_order", "is_storage",
    "__array_priority__", "__dlpack_device__", "is_set_to",
))
# fmt: on
"""Calls about a tensor, not about its elements, which are not nodes: placeholders answer them too."""


FREEZING = frozenset(("requires_grad_", "requires_grad="))
"""Calls that every stage makes for parameters, and that are not nodes."""


class ModuleInterceptor:
    """Interceptor of chosen modules and of opaque calls: while installed, each is passed to the current handler.

    Hooks, parameters, names and `isinstance` of modules stay as they are; without a handler, and in other threads, all
    is as usual. The class is swapped because a hook cannot prevent a call, and `__call__` is looked up on the class.

    Opaque calls are those that function modes do not see, and those with tensors inside that cannot be sent: autograd
    Functions, function transforms such as `torch.vmap`, and functions of `torch.jit.script`. They are replaced where
    torch itself looks them up, because users keep `Function.apply` and `torch.vmap(f)` in names of their own.
    """

    def __init__(self, task: nn.Module, names: Iterable[str]):
        self.modules = {name: task.get_submodule(name) for name in names}
        # By identity, as a module may define its own equality; `modules` keeps them alive, so no id is used twice.
        self._names = {id(module): name for name, module in self.modules.items()}
        self._classes: dict[type, type] = {}
        self._handler: TracingMode | None = None
        self._thread = 0  # that of the handler

    @contextmanager
    def installed(self) -> Iterator[None]:
        """Install the intercepting classes and calls in the block."""
        # All classes are read before the first is swapped, as one module may have two of the names.
        originals = [(module, type(module)) for module in self.modules.values()]
        with ExitStack() as stack:
            for owner, name, replacement in self._opaque_calls():
                stack.enter_context(_replaced(owner, name, replacement))
            try:
                for module, original in originals:
                    # Past the `__setattr__` of the user's class, and past the watch of a trace on assignments.
                    object.__setattr__(module, "__class__", self._intercepting(original))
                yield
            finally:
                for module, original in originals:
                    object.__setattr__(module, "__class__", original)

    @contextmanager
    def handled_by(self, handler: TracingMode | None) -> Iterator[None]:
        """Pass calls to `handler` in the block, and run compiled functions eagerly; with `None` all run as usual."""
        outer, self._handler = self._handler, handler
        # Other threads, such as autograd's, may call modules too: these calls are not the step's.
        self._thread = get_ident()
        mode = handler or outer
        try:
            with _compiling(handler is None) if mode and mode.meets_compiled else nullcontext():
                yield
        finally:
            self._handler = outer

    def _current_handler(self) -> TracingMode | None:
        return self._handler if get_ident() == self._thread else None

    def _opaque_calls(self) -> Iterator[tuple[Any, str, Any]]:
        """Yield for each kind of opaque call its owner, its name there, and what replaces it."""

        def intercepted(name: str, call: Call, *args: Any, **kwargs: Any) -> Any:
            handler = self._current_handler()
            return call(*args, **kwargs) if handler is None else handler.opaque_call(name, call, args, kwargs)

        def apply(function: type[_SingleLevelFunction], *args: Any, **kwargs: Any) -> Any:
            # What `Function.apply` would reach: the method of the C class, which makes the node of autograd.
            outer: Any = super(_APPLYING, function)
            return intercepted(f"{function.__name__}.apply", outer.apply, *args, **kwargs)

        def note_function(context: Any) -> None:
            handler = self._current_handler()
            if handler is not None:
                handler.note_function(f"{type(context)._forward_cls.__name__}.apply")

        def call_script(function: Any, *args: Any, **kwargs: Any) -> Any:
            return intercepted(function.name, partial(run_script, function), *args, **kwargs)

        run_script = torch._C.ScriptFunction.__call__  # read here, before it is replaced
        yield _APPLYING, "apply", classmethod(apply)
        # Private: torch makes one for each call of a Function, also for a call that has not come through `apply` above.
        yield BackwardCFunction, "__init__", note_function
        yield torch._C.ScriptFunction, "__call__", call_script
        for owner, name in _TRANSFORMS:
            call = partial(_without_saved_tensors_hooks, getattr(owner, name))
            yield owner, name, partial(intercepted, name.removesuffix("_impl"), call)

    def _intercepting(self, original: type) -> type:
        if original not in self._classes:
            names = self._names
            original_call = original.__call__

            def intercepted_call(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
                handler = self._current_handler()
                name = names.get(id(module))  # none for a slice of a Sequential, which inherits the class
                if handler is None or name is None:
                    return original_call(module, *args, **kwargs)
                return handler.module_call(name, original_call.__get__(module), args, kwargs)

            # The names stay those of the user's class, as messages, `repr` and pickles show them.
            namespace = {
                "__call__": intercepted_call,
                "__module__": original.__module__,
                "__qualname__": original.__qualname__,
                "__doc__": original.__doc__,
            }
            # Made by the class's own metaclass, and once: torch and users may keep data by class.
            self._classes[original] = type(original)(original.__name__, (original,), namespace)
        return self._classes[original]


# Private: up to torch 2.13 `Function.apply` looks `apply` up in its base class, which also meets names that users have
# bound to it before. From 2.14 on it is the method of the C class itself: nothing can replace what is bound to that.
_APPLYING = Function if isbuiltin(Function.apply) else _SingleLevelFunction

# Private: where the public transforms look up what they call. Users hold the public ones, which cannot be replaced.
_TRANSFORMS = (
    (function_transforms, "vmap_impl"),
    (eager_transforms, "grad_impl"),
    (eager_transforms, "grad_and_value_impl"),
)


def _without_saved_tensors_hooks(transform: Call, *args: Any, **kwargs: Any) -> Any:
    """Call a transform of torch.func, which does not run under hooks on saved tensors."""
    # Private: the public contexts can add hooks or forbid them, but not lift those of an outer block.
    hooks = torch._C._autograd._top_saved_tensors_default_hooks(False)
    if hooks is None:
        return transform(*args, **kwargs)
    torch._C._autograd._pop_saved_tensors_default_hooks()
    try:
        return transform(*args, **kwargs)
    finally:
        torch._C._autograd._push_saved_tensors_default_hooks(*hooks)


def _compiling(enabled: bool) -> AbstractContextManager[Any]:
    """Return a context in which functions of torch.compile run as compiled or not: their calls can be nodes then."""
    if "torch._dynamo" not in sys.modules:  # nothing is compiled, and `set_stance` would import it for seconds
        return nullcontext()
    context: AbstractContextManager[Any] = torch.compiler.set_stance("default" if enabled else "force_eager")
    return context


@contextmanager
def _replaced(owner: Any, name: str, replacement: Any) -> Iterator[None]:
    """Replace an attribute of a module or class of torch in the block."""
    # Of the owner alone: an inherited attribute that is put back as its own would hide later changes of the base.
    inherited = name not in vars(owner)
    original = vars(owner).get(name)
    setattr(owner, name, replacement)
    try:
        yield
    finally:
        if inherited:
            delattr(owner, name)
        else:
            setattr(owner, name, original)


# Private: torch has no public way to read or to remove the hooks that others have registered.
_HOOKS = ("_forward_pre_hooks", "_forward_hooks")


@contextmanager
def same_hooks(modules: Iterable[nn.Module]) -> Iterator[None]:
    """Restore the forward hooks of the modules at the end of the block."""
    tables = [getattr(module, name) for module in modules for name in _HOOKS]
    saved_tables = [dict(table) for table in tables]
    try:
        yield
    finally:
        for table, hooks in zip(tables, saved_tables, strict=True):
            table.clear()  # in place, as the handles of hooks refer to the table
            table.update(hooks)


@contextmanager
def without_hooks(modules: Iterable[nn.Module]) -> Iterator[None]:
    """Remove the forward hooks of the modules in the block."""
    modules = list(modules)
    with same_hooks(modules):
        for module in modules:
            for name in _HOOKS:
                getattr(module, name).clear()
        yield


class TracingMode(TorchFunctionMode):
    """Passes every torch call that is not about metadata to `torch_call`; handles intercepted modules."""

    meets_compiled = True
    """True if the step may call functions of torch.compile; to switch these takes time at every module."""

    def __init__(self) -> None:
        super().__init__()
        self.requires_grad: dict[nn.Parameter, bool] = {}
        """The parameters that the step freezes or unfreezes, with what they were before."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        name = function_name(func)
        if name in METADATA:
            return func(*args, **(kwargs or {}))
        if name in FREEZING and isinstance(args[0], nn.Parameter):
            # The first value counts: a step may freeze and unfreeze a parameter several times.
            self.requires_grad.setdefault(args[0], args[0].requires_grad)
            return func(*args, **(kwargs or {}))
        return self.torch_call(name, func, args, kwargs or {})

    def torch_call(self, name: str, call: Call, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Return the result of a torch call."""
        raise NotImplementedError

    def module_call(self, name: str, call: Call, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Return the result of the module `name`; `call` is the module without the interceptor."""
        raise NotImplementedError

    def opaque_call(self, name: str, call: Call, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Return the result of an opaque call, which is one node with all calls inside of it."""
        return self.module_call(name, call, args, kwargs)

    def note_function(self, name: str) -> None:
        """Note that an autograd Function runs, in an opaque call or outside of all of them."""


def function_name(function: Any) -> str:
    """Return the short name of a torch function, method or property."""
    name: str = getattr(function, "__name__", "") or type(function).__name__
    if name == "__get__":  # a property such as `tensor.T`: its descriptor has the name
        return str(function.__self__.__name__)
    if name == "__set__":
        return f"{function.__self__.__name__}="
    return GRADIENT if function is torch.autograd.grad else name
