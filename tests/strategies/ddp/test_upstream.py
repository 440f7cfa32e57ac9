"""PyTorch's own tests of DistributedDataParallel, as installed with torch, run on the drop-in.

Most of them ask for two GPUs though nothing in them needs one. Here they run on gloo: in the processes of a test
the checks for GPUs are taken away, and tensors for a GPU stay on the CPU.
"""

from __future__ import annotations

import importlib
import os
import sys
import traceback
import unittest
import warnings
from collections.abc import Callable
from contextlib import ExitStack, nullcontext
from functools import partial
from types import ModuleType
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.overrides import TorchFunctionMode
from trainkit.strategies.ddp import DistributedDataParallel

from tests.marks import EVERY_CASE
from trainkit.testing import run_ranks

UPSTREAM = "torch.testing._internal.distributed.distributed_test"
GPU_CHECKS = ("skip_if_lt_x_gpu", "nccl_skip_if_lt_x_gpu", "require_n_gpus_for_nccl_backend")


class OnCpu(TorchFunctionMode):
    """Keeps on the CPU what is sent to a GPU."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if func is torch.Tensor.cuda:
            return args[0]
        if kwargs.get("device") is not None:
            kwargs["device"] = torch.device("cpu")
        if func is torch.Tensor.to or func is torch._C._nn._parse_to:
            args = [torch.device("cpu") if _is_gpu(value) else value for value in args]
        return func(*args, **kwargs)


def _is_gpu(value: object) -> bool:
    if isinstance(value, torch.device):
        return value.type == "cuda"
    return type(value) is int or (isinstance(value, str) and value.startswith("cuda"))


class DropIn(DistributedDataParallel):
    """Our drop-in, without arguments for GPUs."""

    def __init__(self, module: Any, device_ids: Any = None, output_device: Any = None, **arguments: Any) -> None:
        super().__init__(module, **arguments)


def outcomes_of(names: list[str], folder: str) -> list[str]:
    """Return for each of upstream's tests "passed", or how it ended; the first that fails is the last that is run."""
    os.environ.update(BACKEND="gloo", TEMP_DIR=folder, INIT_METHOD="env://", MASTER_ADDR="127.0.0.1")
    warnings.simplefilter("ignore")
    with ExitStack() as patches:
        _pretend(patches)
        upstream = importlib.import_module(UPSTREAM)
        case: Any = type("Case", (upstream.TestDistBackend, upstream.DistributedTest._DistTestBase), {})
        outcomes = []
        for name in names:
            test = case(name)
            test.rank, test.file_name = dist.get_rank(), f"{folder}/{name}"
            torch.manual_seed(0)  # upstream starts each test in new processes
            outcomes.append(_outcome(getattr(test, name)))
            if outcomes[-1] != "passed":
                break  # the ranks no longer do the same
        return outcomes


def _pretend(patches: ExitStack) -> None:
    """Take away the need for GPUs, and put our class in the place of PyTorch's."""
    expecttest: Any = ModuleType("expecttest")  # which upstream wants, though these tests do not use it
    expecttest.TestCase = unittest.TestCase
    patches.enter_context(mock.patch.dict(sys.modules, expecttest=expecttest))
    checks = importlib.import_module("torch.testing._internal.common_distributed")
    for name in GPU_CHECKS:
        patches.enter_context(mock.patch.object(checks, name, lambda *_: lambda test: test))
    patches.enter_context(mock.patch.object(checks, "skip_if_no_gpu", lambda test: test))
    for name in ("set_device", "synchronize"):
        patches.enter_context(mock.patch.object(torch.cuda, name, lambda *_, **__: None))
    patches.enter_context(mock.patch.object(torch.cuda, "current_device", dist.get_rank))
    patches.enter_context(mock.patch.object(torch.cuda, "device", lambda *_, **__: nullcontext()))
    patches.enter_context(mock.patch.object(torch.cuda, "device_count", dist.get_world_size))
    patches.enter_context(mock.patch.object(torch.nn.Module, "cuda", lambda module, *_: module))
    for home in (torch.nn.parallel, torch.nn.parallel.distributed):
        patches.enter_context(mock.patch.object(home, "DistributedDataParallel", DropIn))
    # Inductor, which is imported and compiles with a C++ compiler for many seconds, is not what is tested here.
    patches.enter_context(mock.patch.object(torch, "compile", partial(torch.compile, backend="aot_eager")))
    patches.enter_context(OnCpu())


def _outcome(test: Callable[[], None]) -> str:
    try:
        test()
    except unittest.SkipTest as skip:
        return f"skipped: {skip}"
    except Exception:
        return traceback.format_exc()
    return "passed"


PASSED = (
    "test_DistributedDataParallelCPU",
    "test_DistributedDataParallelCPU_grad_is_view",
    "test_DistributedDataParallel_requires_grad",
    "test_ddp_zero_output_features",
    "test_ddp_create_graph",
    "test_ddp_hook_parity_allreduce",
    "test_ddp_hook_parity_allreduce_process_group",
    "test_ddp_hook_parity_powerSGD",
    "test_ddp_hook_parity_post_localSGD",
    "test_accumulate_gradients_no_sync",
    "test_accumulate_gradients_no_sync_grad_is_view",
    "test_accumulate_gradients_no_sync_allreduce_hook",
    "test_accumulate_gradients_no_sync_allreduce_with_then_hook",
    "test_DistributedDataParallel_with_amp_and_grad_is_view",
    "test_ddp_uneven_input_join_disable",
    "test_ddp_uneven_input_exception",
    "test_ddp_shared_grad_acc_unused_params",
    "test_ddp_namedtuple",
    "test_grads_same_across_ranks_with_no_sync",
    "test_compute_bucket_assignment_by_size_sparse_error_without_logger",
    "test_verify_model_across_rank_with_logger",
    "test_verify_model_across_rank_without_logger",
    "test_ddp_model_diff_num_params_across_ranks",
    "test_output_unused_in_loss_tuple_module",
    "test_output_unused_in_loss_dict_module",
    "test_ddp_inference",
    "test_ddp_static_graph_nested_types",
    "test_ddp_returns_tensor_with_no_grad",
    "test_ddp_new_tensor_in_fwd",
    "test_ddp_new_tensor_in_fwd_static_graph",
    "test_ddp_broadcast_buffer",
    "test_static_graph_multi_forward",
    "test_stateless_api_with_ddp",
    "test_ddp_forward_backward_hook",
    "test_ddp_join_model_equivalence",
    "test_ddp_ignore_params_arg",
    "test_undefined_grad_parity_unused_parameters",
    "test_ddp_remove_autograd_hooks",
    "test_ddp_join_respects_forward_sync_buffers_false",
    "test_ddp_init_sync_buffers_with_forward_sync_buffers_false",
    "test_post_localSGD_optimizer_parity",
    "test_post_localSGD_optimizer_parity_grad_is_view",
    "test_post_localSGD_optimizer_parity_with_hierarchical_sgd",
    "test_post_localSGD_optimizer_parity_with_hierarchical_sgd_grad_is_view",
    "test_post_localSGD_optimizer_step_reload",
    "test_ddp_compile_static_graph",
    "test_ddp_grad_div_uneven_inputs",
    "test_ddp_device_mesh_initialization",
    "test_ddp_comm_hook_logging",
    "test_ddp_logging_data_cpu",
    "test_sync_bn_logged",
    "test_ddp_bucket_cap_mb_list",
    "test_ddp_buffer_hook_allreduce",
    "test_ddp_buffer_hook_allreduce_return_future",
    "test_ddp_broadcast_buffer_via_hook",
    "test_ddp_build_debug_param_to_name_mapping",
    "test_ddp_build_debug_param_to_name_mapping_requires_grad",
    "test_get_data_parallel_params",
    "test_ddp_sync_module_states",
    "test_ddp_sink_noclone",
)
COSTLY = {"test_ddp_compile_static_graph", "test_ddp_hook_parity_post_localSGD", "test_ddp_hook_parity_powerSGD"}
"""Half of the processor time, in `make zoo`; other tests compare static graphs and hooks of PyTorch with stock DDP."""


@pytest.mark.slow
@pytest.mark.skipif(not torch.__version__.startswith("2.13"), reason="the list was made with the tests of torch 2.13")
def test_the_drop_in_passes_upstreams_tests(tmp_path):
    for folder in ("barrier", "test_dir", "init_dir"):
        (tmp_path / folder).mkdir()
    names = [name for name in PASSED if EVERY_CASE or name not in COSTLY]
    for outcomes in run_ranks(outcomes_of, 2, names, str(tmp_path)):
        ended = dict(zip(names, outcomes, strict=False))
        assert {name: outcome for name, outcome in ended.items() if outcome != "passed"} == {}
        assert len(outcomes) == len(names)
