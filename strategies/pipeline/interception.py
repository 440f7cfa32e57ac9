"""Interception of module calls and torch functions."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

Call = Callable[..., Any]


class CallHandler(Protocol):
    """Handler of the calls of intercepted modules."""

    def module_call(self, name: str, call: Call, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Return the result of the module `name`; `call` is the module as it is without interceptor."""


class ModuleInterceptor:
    """Interceptor of chosen modules: while installed, their class passes each call to the open handler.

    Hooks, parameters, names and `isinstance` stay as they are; without an open handler the modules behave as
    before. The class is swapped because a hook cannot prevent a call, and `__call__` is looked up on the class.
    """

    def __init__(self, modules: Mapping[str, nn.Module]):
        self._modules = dict(modules)
        self._names = {id(module): name for name, module in modules.items()}
        self._classes: dict[type, type] = {}
        self._handler: CallHandler | None = None

    @contextmanager
    def installed(self) -> Iterator[None]:
        """Install the intercepting classes in the block."""
        originals = [(module, type(module)) for module in self._modules.values()]
        try:
            for module, original in originals:
                object.__setattr__(module, "__class__", self._intercepting(original))
            yield
        finally:
            for module, original in originals:
                object.__setattr__(module, "__class__", original)

    @contextmanager
    def handled_by(self, handler: CallHandler | None) -> Iterator[None]:
        """Lead calls through `handler`; `None` lets them through."""
        outer, self._handler = self._handler, handler
        try:
            yield
        finally:
            self._handler = outer

    def _intercepting(self, original: type) -> type:
        if original not in self._classes:
            names = self._names
            original_call = original.__call__

            def intercepted_call(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
                handler = self._handler
                name = names.get(id(module))  # none for a slice of a Sequential, which inherits the class
                if handler is None or name is None:
                    return original_call(module, *args, **kwargs)
                return handler.module_call(name, original_call.__get__(module), args, kwargs)

            namespace = {
                "__call__": intercepted_call,
                "__module__": original.__module__,
                "__qualname__": original.__qualname__,
                "__doc__": original.__doc__,
            }
            self._classes[original] = type(original)(original.__name__, (original,), namespace)
        return self._classes[original]


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
"""Calls that ask about a tensor, not about its elements: placeholders answer them too."""

SIDE_EFFECTS = frozenset({"register_hook", "register_post_accumulate_grad_hook", "retain_grad"})
"""Calls without a tensor as result that are made once, in the stage they belong to."""


GRADIENT = "autograd.grad"
"""Name of `torch.autograd.grad`, to tell it from the attribute `grad`."""


def function_name(function: Any) -> str:
    """Return the short name of a torch function, method or property."""
    name: str = getattr(function, "__name__", "") or type(function).__name__
    if name == "__get__":
        return str(function.__self__.__name__)
    if name == "__set__":
        return f"{function.__self__.__name__}="
    return GRADIENT if function is torch.autograd.grad else name


class TracingMode(TorchFunctionMode):
    """Leads every torch call that is not about metadata through `torch_call`."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Answer questions about metadata at once; everything else may be a node."""
        name = function_name(func)
        if name in METADATA:
            return func(*args, **(kwargs or {}))
        return self.torch_call(name, func, args, kwargs or {})

    def torch_call(self, name: str, call: Call, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Return the result of a torch call."""
        raise NotImplementedError
