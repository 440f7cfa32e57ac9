"""The torch calls of a step, seen one by one: what is an event and what merely asks about a tensor."""

from __future__ import annotations

from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from .interception import Call

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
"""What `torch.autograd.grad` is called, which is no question about a tensor as its attribute `grad` is."""


def function_name(function: Any) -> str:
    """Return the short name of a torch function, method or property."""
    name: str = getattr(function, "__name__", "") or type(function).__name__
    if name == "__get__":
        return str(function.__self__.__name__)
    if name == "__set__":
        return f"{function.__self__.__name__}="
    return GRADIENT if function is torch.autograd.grad else name


class EventMode(TorchFunctionMode):
    """Leads every torch call that is not about metadata through `torch_call`."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Answer questions about metadata at once; everything else may be an event."""
        name = function_name(func)
        if name in METADATA:
            return func(*args, **(kwargs or {}))
        return self.torch_call(name, func, args, kwargs or {})

    def torch_call(self, name: str, call: Call, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Return the result of a torch call."""
        raise NotImplementedError
