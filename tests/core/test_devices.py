"""Choosing a device by name; the waits, generators and current device of GPUs."""

from functools import partial
from pathlib import Path

import pytest
import torch
from trainkit.strategies.ddp import DDPStrategy
from trainkit.strategies.single import SingleStrategy

from tests.marks import on_gpu
from tests.tasks import Regression, regression_data
from trainkit import Data, Trainer, UserError
from trainkit.data.batch import MicroBatch, StepBatch
from trainkit.data.prefetch import prefetched
from trainkit.devices import OLDEST_TORCH, check_torch, generator_state, is_out_of_memory, pick
from trainkit.optim.precision import Precision
from trainkit.rng import preserve_rng, rng_state, set_rng_state
from trainkit.testing import run_ranks
from trainkit.tree import to_device


def test_the_cpu_is_always_there():
    assert pick("cpu") == torch.device("cpu")


def test_auto_takes_the_best_device():
    has_mps = torch.backends.mps.is_available()
    best = "cuda" if torch.cuda.is_available() else "mps" if has_mps else "cpu"
    assert pick("auto").type == best


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("gpu", r"unknown device 'gpu'.*Choose auto, cpu, cuda, cuda:0 or mps"),
        ("cdua", r"Did you mean 'cuda'"),
        ("cuda:x", r"unknown device 'cuda:x'"),
        ("cuda:-1", r"unknown device"),
        ("", r"unknown device ''"),
    ],
)
def test_an_unknown_device_is_rejected_with_the_known_ones(name, message):
    with pytest.raises(UserError, match=message):
        pick(name)


def test_a_missing_cuda_device_is_rejected_with_the_number_of_devices():
    with pytest.raises(UserError, match=r"'cuda:99' is not available: torch sees \d+ CUDA devices?; set device="):
        pick("cuda:99")


@pytest.mark.parametrize("name", ["cuda:99", "gpu"])
def test_an_unknown_device_ends_a_run_before_anything_is_written(make_trainer, name):
    trainer = make_trainer(SingleStrategy(device=name))
    with pytest.raises(UserError, match=r"device"):
        trainer.fit(Regression(), Data(train=regression_data(8), batch_size=4))
    assert not trainer.run_dir.exists()


@pytest.mark.parametrize(
    "text",
    [
        "CUDA error: out of memory",
        "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`",
        "cuDNN error: CUDNN_STATUS_ALLOC_FAILED",
        "NCCL error: Last error: Failed to CUDA calloc async 608 bytes",
    ],
)
def test_libraries_below_torch_run_out_of_memory_by_words(text):
    assert is_out_of_memory(RuntimeError(text))
    assert is_out_of_memory(torch.OutOfMemoryError("any"))
    assert not is_out_of_memory(RuntimeError("shapes cannot be multiplied"))
    assert not is_out_of_memory(ValueError(text))


def test_an_unknown_device_of_a_cluster_is_rejected_too():
    with pytest.raises(UserError, match=r"unknown device 'cuda:x'"):
        DDPStrategy(device="cuda:x", devices=2, launcher="ray").validate(Regression(), Precision())


# ---- On a GPU: each was wrong in silence before there was one


def made_late(device, value):
    """Return a tensor that a queued kernel makes."""
    torch.cuda._sleep(10_000_000)
    return torch.zeros(1000, device=device) + value


@on_gpu
def test_what_is_copied_to_the_cpu_is_there():
    batch = [made_late("cuda", 3.0), {"label": made_late("cuda", 4.0)}]
    copied = to_device(batch, torch.device("cpu"))
    assert (copied[0].sum().item(), copied[1]["label"].sum().item()) == (3000.0, 4000.0)


class OwnBatch:
    def __init__(self, values):
        self.values = values

    def to(self, device):
        return OwnBatch(self.values.to(device, non_blocking=True))


MAKE_BATCH = {
    "a tensor": lambda number: torch.full((1000,), float(number)),
    "a type of its own": lambda number: OwnBatch(torch.full((1000,), float(number)).pin_memory()),
    "on the device": lambda number: made_late("cuda", float(number)),
}


@on_gpu
@pytest.mark.parametrize("kind", MAKE_BATCH)
def test_prefetched_batches_have_their_values_while_they_are_used_late(kind):
    def step_batches():
        for number in range(6):
            yield StepBatch([MicroBatch(MAKE_BATCH[kind](number), 1)], 1, 1, number == 5)

    device, sums = torch.device("cuda"), []
    move = partial(to_device, device=device, dtype=torch.float64)
    for step_batch in prefetched(step_batches(), move, device=device, pin_memory=True):
        batch = step_batch.micro_batches[0].batch
        torch.cuda._sleep(10_000_000)
        sums.append((batch.values if isinstance(batch, OwnBatch) else batch).double().sum())
        del batch, step_batch  # its memory may be used for the next one
    assert torch.stack(sums).tolist() == [1000.0 * number for number in range(6)]


@partial(on_gpu, devices=2)
def test_the_generator_of_a_rank_comes_back_on_a_device_of_another_index():
    first, second = torch.device("cuda:0"), torch.device("cuda:1")
    torch.cuda.manual_seed_all(5)
    saved = rng_state([second])
    expected = torch.rand(4, device=second).tolist()
    set_rng_state(saved, [first])
    assert torch.rand(4, device=first).tolist() == expected


@on_gpu
def test_draws_in_a_block_leave_the_generators_of_devices_alone():
    before = generator_state(torch.device("cuda:0"))
    with preserve_rng():
        torch.rand(4, device="cuda:0")
        assert not torch.equal(generator_state(torch.device("cuda:0")), before)
    assert torch.equal(generator_state(torch.device("cuda:0")), before)


def devices_of(strategy):
    strategy.setup(Precision())
    return str(strategy.device), torch.cuda.current_device()


@partial(on_gpu, devices=2)
def test_a_strategy_computes_on_the_device_that_it_names():
    assert devices_of(SingleStrategy(device="cuda:1")) == ("cuda:1", 1)
    torch.cuda.set_device(0)
    assert run_ranks(devices_of, 1, DDPStrategy(device="cuda:1", devices=1)) == [("cuda:1", 1)]


@partial(on_gpu, devices=2)
@pytest.mark.parametrize("starts", [True, False], ids=["here", "by torchrun"])
def test_one_device_for_several_ranks_is_refused_before_they_start(starts, monkeypatch):
    if not starts:
        for name in ("RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
            monkeypatch.setenv(name, "2")
    strategy = DDPStrategy(device="cuda:1", devices=2)
    with pytest.raises(UserError, match=r"device=cuda:1 is one device for 2 ranks; set strategy.device=cuda"):
        strategy.validate(Regression(), Precision())
    DDPStrategy(device="cuda:1", devices=2, backend="gloo").validate(Regression(), Precision())


def test_an_old_torch_is_refused_at_the_start_with_what_to_type(monkeypatch):
    monkeypatch.setattr(torch, "__version__", torch.torch_version.TorchVersion("2.7.1+cpu"))
    with pytest.raises(UserError, match=r"torch 2\.7\.1\+cpu is installed; type: pip install 'torch>=2\.8'"):
        Trainer()
    for version in ("2.8.0", "2.10.0", "2.13.0+cpu"):
        monkeypatch.setattr(torch, "__version__", torch.torch_version.TorchVersion(version))
        check_torch()


def test_the_oldest_torch_is_that_of_the_requirements():
    assert f'"torch>={OLDEST_TORCH}"' in (Path(__file__).parents[2] / "pyproject.toml").read_text()
