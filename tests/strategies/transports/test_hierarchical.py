"""Several simulated hosts: sums inside each, sums between them, and the weights of one device."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from trainkit.strategies.ddp import DDPStrategy
from trainkit.strategies.single import SingleStrategy
from trainkit.strategies.transports.process_group import ProcessGroupTransport
from trainkit.strategies.transports.selection import open_transport
from trainkit.strategies.transports.shared_memory import HierarchicalTransport

from tests.equality import largest_difference
from tests.strategies.fusion.training import pretend_hosts, trained
from tests.strategies.transports.sums import wrong_sums
from tests.tasks import EachStep
from trainkit.distributed.collectives import gather
from trainkit.distributed.failure_store import FailureStore
from trainkit.testing import run_ranks


def opened(name: str = "auto", reduce_dtype: torch.dtype | None = None):
    group = dist.group.WORLD
    store = FailureStore(group, token="test")
    collective = ProcessGroupTransport(group, failure_store=store, device=torch.device("cpu"), timeout_seconds=120)
    return open_transport(collective, name=name, reduce_dtype=reduce_dtype)


def rounded(tensor: torch.Tensor, reduce_dtype: torch.dtype | None) -> torch.Tensor:
    is_sent_rounded = reduce_dtype is not None and tensor.dtype in (torch.float32, torch.float64)
    return tensor.to(reduce_dtype) if is_sent_rounded else tensor


def sums_of_all_types(reduce_dtype: torch.dtype | None) -> list[str]:
    pretend_hosts(2)
    transport = opened(reduce_dtype=reduce_dtype)
    assert isinstance(transport, HierarchicalTransport)
    return wrong_sums(
        transport,
        lambda parts: rounded(parts[0] + parts[1], reduce_dtype) + rounded(parts[2] + parts[3], reduce_dtype),
    )


@pytest.mark.parametrize("reduce_dtype", [None, torch.bfloat16, torch.float16])
def test_sums_are_those_of_the_hosts_added_up_and_rounded_only_between_them(reduce_dtype):
    assert run_ranks(sums_of_all_types, 4, reduce_dtype) == [[]] * 4


def chosen(ranks_of_a_host: int, name: str) -> str:
    pretend_hosts(ranks_of_a_host)
    try:
        return type(opened(name)).__name__
    except ValueError as error:
        return str(error)


@pytest.mark.parametrize(
    ("num_ranks", "ranks_of_a_host", "transport"),
    [(2, 1, "ProcessGroupTransport"), (3, 2, "ProcessGroupTransport"), (3, 3, "SharedMemoryTransport")],
)
def test_other_layouts_use_the_transport_that_they_used(num_ranks, ranks_of_a_host, transport):
    assert run_ranks(chosen, num_ranks, ranks_of_a_host, "auto") == [transport] * num_ranks


def test_shared_memory_that_is_asked_for_needs_hosts_of_equal_numbers_of_ranks():
    for message in run_ranks(chosen, 3, 2, "shared_memory"):
        assert "unequal numbers of ranks" in message and 'transport="auto"' in message


def trained_on_this_rank(name: str, bucket_cap_mb: float | None, in_backward: bool, run_dir) -> tuple[float, bool]:
    """Return the largest difference from single in fp64, and True if all ranks have the same bits after each step."""
    alone = trained(SingleStrategy(device="cpu"), name, run_dir=run_dir / f"single_{dist.get_rank()}", precision="fp64")
    pretend_hosts(2)
    strategy = DDPStrategy(device="cpu", bucket_cap_mb=bucket_cap_mb, optimizer_in_backward=in_backward)
    recorder = EachStep(lambda run: type(run.strategy.gradients.reducer.transport).__name__)
    ours = trained(strategy, name, recorder, run_dir=run_dir / "ddp", precision="fp64")
    assert recorder.seen[-1] == "HierarchicalTransport"
    of_ranks = gather(ours, dist.group.WORLD)
    same = all(largest_difference(others, ours) == 0.0 for others in of_ranks)
    return largest_difference(ours, alone), same


@pytest.mark.parametrize(
    ("name", "bucket_cap_mb", "in_backward"),
    [
        ("perceptron", 0.0005, False),
        pytest.param("perceptron", None, True, marks=pytest.mark.slow),
        pytest.param("gpt", 0.001, False, marks=pytest.mark.slow),
    ],
)
def test_ranks_of_two_hosts_train_to_the_weights_of_one_device(name, bucket_cap_mb, in_backward, tmp_path):
    for difference, same in run_ranks(trained_on_this_rank, 4, name, bucket_cap_mb, in_backward, tmp_path):
        # Integer token weights, such as the GPT's, are divided in fp32 in every precision.
        assert difference < (1e-6 if name == "gpt" else 1e-10)
        assert same
