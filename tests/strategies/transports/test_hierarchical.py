"""Several simulated hosts: sums inside each, sums between them, and the weights of one device."""

from __future__ import annotations

import time

import pytest
import torch
import torch.distributed as dist
from trainkit.strategies.ddp import DDPStrategy
from trainkit.strategies.single import SingleStrategy
from trainkit.strategies.transports.process_group import ProcessGroupTransport
from trainkit.strategies.transports.selection import open_transport
from trainkit.strategies.transports.shared_memory import HierarchicalTransport

from tests.equality import largest_difference, numbers
from tests.strategies.fusion.training import FailingOnLastRank, pretend_hosts, train, trained
from tests.tasks import Recorder
from trainkit import Data
from trainkit.distributed.collectives import gather
from trainkit.distributed.failure_store import FailureStore
from trainkit.testing import rank_outcomes, run_ranks


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
    sizes = [
        (1, torch.float32),
        (100_003, torch.float32),
        (0, torch.float32),
        (777, torch.float64),
        (1000, torch.bfloat16),
        (33, torch.float16),
        (40_000, torch.complex64),
    ]
    flats = transport.allocate(sizes)
    rank, wrong = dist.get_rank(), []
    for turn in range(5):
        parts = [
            [torch.randn(n, dtype=dtype, generator=torch.Generator().manual_seed(100 * turn + r)) for n, dtype in sizes]
            for r in range(4)
        ]
        works = []
        for number, flat in enumerate(flats):
            flat.copy_(parts[rank][number])
            works.append(transport.start(number, where="a test"))
            if rank == turn % 4:
                time.sleep(0.002)  # ranks are never in step
        for number, work in enumerate(works):
            work.wait()
            first, second, third, fourth = (part[number] for part in parts)
            of_hosts = rounded(first + second, reduce_dtype) + rounded(third + fourth, reduce_dtype)
            if not torch.equal(flats[number], of_hosts.to(flats[number].dtype)):
                wrong.append(f"turn {turn}, {sizes[number]}")
    transport.close()
    return wrong


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


class TransportRecorder(Recorder):
    name = ""

    def on_step_end(self, run):
        self.name = type(run.strategy.gradients.reducer.transport).__name__


def trained_on_this_rank(name: str, bucket_cap_mb: float | None, in_backward: bool, run_dir) -> tuple[float, bool]:
    """Return the largest difference from single in fp64, and True if all ranks have the same bits after each step."""
    alone = trained(SingleStrategy(device="cpu"), name, run_dir=run_dir / f"single_{dist.get_rank()}", precision="fp64")
    pretend_hosts(2)
    strategy = DDPStrategy(device="cpu", bucket_cap_mb=bucket_cap_mb, optimizer_in_backward=in_backward)
    recorder = TransportRecorder()
    ours = trained(strategy, name, recorder, run_dir=run_dir / "ddp", precision="fp64")
    assert recorder.name == "HierarchicalTransport"
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


def failing(run_dir) -> None:
    pretend_hosts(2)
    strategy = DDPStrategy(device="cpu", timeout_seconds=600.0)
    train(strategy, FailingOnLastRank(), Data(train=numbers(24), batch_size=6), run_dir=run_dir, steps=6)


def test_a_failure_on_one_host_ends_the_ranks_of_all(tmp_path):
    outcomes = rank_outcomes(failing, 4, tmp_path, patience=60)
    assert "ZeroDivisionError: rank 3 cannot go on" in outcomes[3].failure
    for outcome in outcomes[:3]:
        assert "rank 3" in outcome.failure and "cannot go on" in outcome.failure
