"""micro_batch_size=auto: micro-batches are halved on all ranks, or grow, until they fit; with the same weights."""

import logging
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import TensorDataset
from trainkit.callbacks.checkpoint import Checkpoint
from trainkit.strategies import multiprocess
from trainkit.strategies.ddp import DDPStrategy
from trainkit.strategies.dp.strategy import DataParallelStrategy
from trainkit.strategies.fsdp.strategy import FSDPStrategy
from trainkit.strategies.fusion.strategy import FusionStrategy
from trainkit.strategies.pipeline.strategy import PipelineStrategy
from trainkit.strategies.single import SingleStrategy
from trainkit.strategies.torch_ddp import TorchDDPStrategy

from tests.tasks import Recorder, assert_close, assert_same_bits
from tests.tasks import fit as train
from trainkit import Callback, Data, TaskModule, Trainer, UserError
from trainkit.data.batch import MicroBatch, StepBatch
from trainkit.devices import DeviceMemory
from trainkit.loops.oom import resplit
from trainkit.metrics.metric import Metric
from trainkit.testing import run_ranks


class Counter(Metric):
    def __init__(self) -> None:
        super().__init__()
        self.add_state("count", torch.zeros((), dtype=torch.int64))

    def update(self, inputs: torch.Tensor) -> None:
        self.count += len(inputs)

    def compute(self) -> Any:
        return self.count


class Large(TaskModule):
    """Runs out of memory for more than `limit` samples, in forward or `in_backward`."""

    def __init__(self, limit: int = 10**9, *, rank: int | None = None, in_backward: bool = False, norm: bool = True):
        super().__init__()
        torch.manual_seed(0)
        self.limit, self.rank, self.in_backward = limit, rank, in_backward
        layers = [nn.Linear(4, 8), nn.BatchNorm1d(8) if norm else nn.Tanh(), nn.Dropout(0.3), nn.Linear(8, 1)]
        self.network = nn.Sequential(*layers)
        self.counter = Counter()
        self.sizes: list[int] = []
        self.note_size = self.sizes.append  # of all replicas: a step must not use a list that it changes

    def training_step(self, batch: Any) -> Any:
        inputs, targets = batch
        self.note_size(len(inputs))
        here = self.rank is None or dist.get_rank() == self.rank
        self.counter.update(inputs)
        outputs = self.network(inputs)
        if here and len(inputs) > self.limit:
            if not self.in_backward:
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB.\nMore.")
            outputs.register_hook(_out_of_memory)
        return {"loss": (outputs - targets).square().mean(), "count": self.counter}

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=0.01)


def _out_of_memory(gradient: torch.Tensor) -> None:
    raise torch.OutOfMemoryError("CUDA out of memory.")


def data(num_samples: int = 44, *, pre_batched: bool = False) -> Data:
    generator = torch.Generator().manual_seed(1)
    dataset = TensorDataset(*(torch.randn(num_samples, size, generator=generator) for size in (4, 1)))
    if not pre_batched:
        return Data(train=dataset, batch_size=16)
    batches = [list(rows) for rows in zip(*(t.split(16) for t in dataset.tensors), strict=True)]
    return Data(train=batches, shuffle=False)


def fit(
    strategy: Any, task: Large, *, pre_batched: bool = False, resume: str | None = None, **settings: Any
) -> list[dict[str, float]]:
    recorder = Recorder()
    defaults = {"callbacks": [recorder], "loggers": [], "log_every": "2step", "run_dir": "run"}
    Trainer(strategy, **{**defaults, **settings}).fit(task, data(pre_batched=pre_batched), resume=resume)
    return recorder.logged


@pytest.fixture(autouse=True)
def _in_an_empty_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize("pre_batched", [False, True])
@pytest.mark.parametrize("in_backward", [False, True])
def test_one_device_has_the_weights_of_a_run_that_started_with_the_size_that_fits(caplog, in_backward, pre_batched):
    found, given = Large(5, in_backward=in_backward), Large()
    with caplog.at_level(logging.WARNING):
        logged = fit(SingleStrategy(device="cpu", micro_batch_size="auto"), found, pre_batched=pre_batched)
    expected = fit(SingleStrategy(device="cpu", micro_batch_size=4), given, pre_batched=pre_batched)
    assert_same_bits(found, given)  # with the buffers of batch norm
    assert logged == expected  # with the metric's count
    assert found.sizes[:6] == [16, 8, 4, 4, 4, 4]
    assert "16 samples at once do not fit into memory (CUDA out of memory. Tried to allocate 2 GiB)" in caplog.text or (
        in_backward
    )
    assert "Set strategy.micro_batch_size=4 to start with it." in caplog.text


class Late(Large):
    """Runs out of memory in the second micro-batch of a size, after the first one left gradients."""

    def training_step(self, batch: Any) -> Any:
        self.limit = 4 if len(batch[0]) in self.sizes else 10**9
        return super().training_step(batch)


def test_gradients_of_an_aborted_step_are_dropped():
    found, given = Late(norm=False), Large(norm=False)
    for task in (found, given):
        task.network[2].p = 0.0
    fit(SingleStrategy(device="cpu", micro_batch_size="auto"), found)
    fit(SingleStrategy(device="cpu", micro_batch_size=4), given)
    assert found.sizes[:4] == [16, 16, 8, 8] and set(found.sizes[4:]) == {4}
    assert_close(found, given)


def test_replicas_of_dp_have_the_weights_of_one_device():
    found, given = Large(5, norm=False), Large(norm=False)
    for dropout in (found.network[2], given.network[2]):
        dropout.p = 0.0
    fit(DataParallelStrategy(devices=["cpu", "cpu"], micro_batch_size="auto"), found)
    fit(SingleStrategy(device="cpu", micro_batch_size=4), given)
    assert_close(found, given)


def on_two_ranks() -> Any:
    states = []
    for kind in (DDPStrategy, FusionStrategy):
        for rank in (None, 0, 1):
            found, given = Large(3, rank=rank, in_backward=rank == 1), Large()
            logged = fit(kind(device="cpu", micro_batch_size="auto"), found)
            expected = fit(kind(device="cpu", micro_batch_size=2), given)
            assert logged == expected
            assert_same_bits(found, given)
            assert found.sizes[0] == 8 and set(found.sizes[-8:]) == {2}
            states.append({name: tensor.tolist() for name, tensor in found.named_parameters()})
    return states


class AskOnHost(Callback):
    """Makes ranks exchange the flag through host memory, as on GPUs."""

    def on_fit_start(self, run: Any) -> None:
        run.strategy.comm.asks_on_host = True


def on_two_ranks_as_on_gpus() -> Any:
    marked, backward = [], torch.autograd.backward

    def read(parameters: Any) -> bool:
        raise AssertionError("reading a gradient is a device sync")

    def counted(tensors: Any, gradients: Any = None, *others: Any, **settings: Any) -> None:
        if gradients is not None:  # those that mark the step on a rank without memory
            marked.append(1 if isinstance(gradients, torch.Tensor) else len(gradients))
        backward(tensors, gradients, *others, **settings)

    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(multiprocess, "_has_nan_gradients", read)
        monkeypatch.setattr(torch.autograd, "backward", counted)
        found, given = Large(3, rank=1), Large()
        fit(DDPStrategy(device="cpu", micro_batch_size="auto"), found, callbacks=[AskOnHost()])
        fit(DDPStrategy(device="cpu", micro_batch_size=2), given)
        assert_same_bits(found, given)
        # One at a time: where memory is short there is none for a second set of gradients.
        assert not marked if dist.get_rank() == 0 else set(marked) == {1}
        return {name: tensor.tolist() for name, tensor in found.named_parameters()}


def test_ranks_on_gpus_exchange_a_flag_through_host_memory():
    first, second = run_ranks(on_two_ranks_as_on_gpus, 2)
    assert first == second


@pytest.mark.slow
def test_all_ranks_repeat_a_step_if_one_runs_out_of_memory():
    first, second = run_ranks(on_two_ranks, 2)
    assert first == second


def test_a_resumed_run_starts_with_the_size_that_fits():
    first = Large(5)
    settings = {"callbacks": [Checkpoint()], "max_duration": "2step"}
    fit(SingleStrategy(device="cpu", micro_batch_size="auto"), first, **settings)
    again, whole = Large(5), Large(5)
    train(SingleStrategy(device="cpu", micro_batch_size="auto"), again, data(), resume="run", max_duration="5step")
    assert max(again.sizes) == 4
    fit(SingleStrategy(device="cpu", micro_batch_size=4), whole, max_duration="5step", run_dir="whole")
    assert_same_bits(again, whole)


def test_a_single_sample_that_does_not_fit_raises_an_error():
    with pytest.raises(UserError, match="does not fit into memory with one sample at a time"):
        fit(SingleStrategy(device="cpu", micro_batch_size="auto"), Large(0, norm=False))


def test_without_auto_the_error_is_that_of_torch():
    with pytest.raises(torch.OutOfMemoryError):
        fit(SingleStrategy(device="cpu"), Large(5))


class Pretended(Callback):
    """A device on which a step needs 40 bytes and 10 for each sample at once, and a rank beyond 0 has `limit`."""

    def __init__(self, limit: int) -> None:
        self.limit, self.used, self.steps = limit, 100, 0

    def on_fit_start(self, run: Any) -> None:
        self.sizes, self.seen = run.task.sizes, 0
        run.peak_memory = self

    def measure(self) -> DeviceMemory:
        new, self.seen = self.sizes[self.seen :], len(self.sizes)
        limit = self.limit if dist.get_rank() else 10**6
        peak = self.used + (40 + 10 * max(new) if new else 0)
        assert peak <= limit, "out of memory"
        self.used = 150 if new else self.used  # with the optimizer's state
        return DeviceMemory(peak, self.used, limit - self.used)


def plain() -> Large:
    task = Large(norm=False)
    task.network[2].p = 0.0
    return task


def grown() -> dict[str, Any]:
    found: dict[str, Any] = {}
    cases = {"large": (1000, 6), "smallest": (201, 6), "small": (262, 6), "resumed": (262, 8)}  # bytes, steps
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(FSDPStrategy, "validate", lambda *_: "cpu")  # which refuses `auto` on the CPU
        for name, (limit, steps) in cases.items():
            ours, given, settings = plain(), plain(), {"precision": "fp64", "max_duration": f"{steps}step"}
            strategy = FSDPStrategy(device="cpu", units=["Linear"], micro_batch_size="auto")
            callbacks, resume = [Pretended(limit), Checkpoint()], "small" if name == "resumed" else None
            fit(strategy, ours, run_dir=resume or name, callbacks=callbacks, resume=resume, **settings)
            fit(SingleStrategy(device="cpu"), given, run_dir=f"{name}_{dist.get_rank()}", **settings)
            assert_close(ours, given, rtol=0.0, atol=1e-9)
            found[name] = ours.sizes
    return found


@pytest.mark.slow
def test_micro_batches_of_shards_grow_as_far_as_memory_allows_on_every_rank_and_keep_their_size_in_a_resumed_run():
    first, second = run_ranks(grown, 2)
    assert first == second
    assert first == {  # shards of 8, 8 and 6 samples
        "large": [*[1] * 8, *[2] * 4, 4, 2, 8, 8, 6],
        "smallest": [1] * 44,
        "small": [*[1] * 8, *[2] * 4, 4, 2, 4, 4, 4, 4, 4, 2],
        "resumed": [4, 4, 4, 4],
    }


@pytest.mark.parametrize(
    "make",
    [
        lambda: TorchDDPStrategy(micro_batch_size="auto"),
        lambda: PipelineStrategy(micro_batch_size="auto"),
        lambda: SingleStrategy(micro_batch_size="auto", accumulate=2),
        lambda: DDPStrategy(micro_batch_size="auto", comm_hook="power_sgd"),
        lambda: DDPStrategy(micro_batch_size="auto", optimizer_in_backward=True),
        lambda: FusionStrategy(micro_batch_size="auto", shard_optimizer=True),
        lambda: SingleStrategy(micro_batch_size="some"),
    ],
)
def test_settings_that_cannot_repeat_a_step_reject_auto(make):
    with pytest.raises(UserError, match="micro_batch_size"):
        make()


def test_a_step_batch_is_split_again_by_rows_or_not_at_all():
    batch = {"rows": torch.arange(10), "scale": torch.tensor(2.0), "pair": (torch.ones(10, 2), 3)}
    step_batch = resplit(StepBatch([MicroBatch(batch, 10)], 10, 10, False), 4)
    assert [micro_batch.num_samples for micro_batch in step_batch.micro_batches] == [4, 4, 2]
    assert torch.cat([each.batch["rows"] for each in step_batch.micro_batches]).tolist() == list(range(10))
    assert step_batch.micro_batches[2].batch["pair"][0].shape == (2, 2)
    for wrong in ({"words": ["a"] * 10}, [torch.ones(10), torch.ones(7)]):
        with pytest.raises(UserError, match="cannot split a batch of 10 samples that holds"):
            resplit(StepBatch([MicroBatch(wrong, 10)], 10, 10, False), 4)
