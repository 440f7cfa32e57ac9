"""A micro-batch that does not fit into memory is halved on all ranks, and the weights are what they would have been."""

import logging
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import TensorDataset
from trainkit.callbacks.checkpoint import Checkpoint
from trainkit.strategies import multiprocess as process_group
from trainkit.strategies.ddp import DDPStrategy
from trainkit.strategies.dp.strategy import DataParallelStrategy
from trainkit.strategies.fusion.strategy import FusionStrategy
from trainkit.strategies.pipeline.strategy import PipelineStrategy
from trainkit.strategies.single import SingleStrategy
from trainkit.strategies.torch_ddp import TorchDDPStrategy

from tests.tasks import Recorder, assert_close, assert_same_bits
from trainkit import Callback, Data, TaskModule, Trainer, UserError
from trainkit.data.batch import MicroBatch, StepBatch
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
    """Has no memory for more than `limit` samples; `in_backward` says when it is noticed."""

    def __init__(self, limit: int = 10**9, *, rank: int | None = None, in_backward: bool = False, norm: bool = True):
        super().__init__()
        torch.manual_seed(0)
        self.limit, self.rank, self.in_backward = limit, rank, in_backward
        layers = [nn.Linear(4, 8), nn.BatchNorm1d(8) if norm else nn.Tanh(), nn.Dropout(0.3), nn.Linear(8, 1)]
        self.network = nn.Sequential(*layers)
        self.counter = Counter()
        self.sizes: list[int] = []

    def training_step(self, batch: Any) -> Any:
        inputs, targets = batch
        self.sizes.append(len(inputs))
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


def data(num_samples: int = 44, *, ready: bool = False) -> Data:
    generator = torch.Generator().manual_seed(1)
    dataset = TensorDataset(*(torch.randn(num_samples, size, generator=generator) for size in (4, 1)))
    if not ready:
        return Data(train=dataset, batch_size=16)
    batches = [list(rows) for rows in zip(*(t.split(16) for t in dataset.tensors), strict=True)]
    return Data(train=batches, shuffle=False)


def fit(strategy: Any, task: Large, *, ready: bool = False, **settings: Any) -> list[dict[str, float]]:
    recorder = Recorder()
    defaults = {"callbacks": [recorder], "loggers": [], "log_every": "2step", "run_dir": "run"}
    Trainer(strategy, **{**defaults, **settings}).fit(task, data(ready=ready))
    return recorder.logged


@pytest.fixture(autouse=True)
def _in_an_empty_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize("ready", [False, True])
@pytest.mark.parametrize("in_backward", [False, True])
def test_one_device_ends_as_if_it_had_begun_with_the_size_that_fits(caplog, in_backward, ready):
    found, given = Large(5, in_backward=in_backward), Large()
    with caplog.at_level(logging.WARNING):
        logged = fit(SingleStrategy(device="cpu", micro_batch_size="auto"), found, ready=ready)
    expected = fit(SingleStrategy(device="cpu", micro_batch_size=4), given, ready=ready)
    assert_same_bits(found, given)  # with the buffers of batch norm
    assert logged == expected  # with what the metric has counted
    assert found.sizes[:6] == [16, 8, 4, 4, 4, 4]
    assert "16 samples at once do not fit into memory (CUDA out of memory. Tried to allocate 2 GiB)" in caplog.text or (
        in_backward
    )
    assert "Set strategy.micro_batch_size=4 to start with it." in caplog.text


class Late(Large):
    """Runs out of memory in the second micro-batch of a size, when the gradients of the first are there."""

    def training_step(self, batch: Any) -> Any:
        self.limit = 4 if len(batch[0]) in self.sizes else 10**9
        return super().training_step(batch)


def test_gradients_of_a_window_that_is_given_up_do_not_count():
    found, given = Late(norm=False), Large(norm=False)
    for task in (found, given):
        task.network[2].p = 0.0
    fit(SingleStrategy(device="cpu", micro_batch_size="auto"), found)
    fit(SingleStrategy(device="cpu", micro_batch_size=4), given)
    assert found.sizes[:4] == [16, 16, 8, 8] and set(found.sizes[4:]) == {4}
    assert_close(found, given)


def test_replicas_of_dp_end_alike():
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
    """Lets ranks ask as they do on GPUs, where no gradient is to be read."""

    def on_fit_start(self, run: Any) -> None:
        run.strategy.comm.asks_on_host = True


def on_two_ranks_as_on_gpus() -> Any:
    def read(parameters: Any) -> bool:
        raise AssertionError("reading a gradient waits for the device")

    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(process_group, "_has_nan_gradients", read)
        found, given = Large(3, rank=1), Large()
        fit(DDPStrategy(device="cpu", micro_batch_size="auto"), found, callbacks=[AskOnHost()])
        fit(DDPStrategy(device="cpu", micro_batch_size=2), given)
        assert_same_bits(found, given)
        return {name: tensor.tolist() for name, tensor in found.named_parameters()}


def test_ranks_on_gpus_ask_through_host_memory():
    first, second = run_ranks(on_two_ranks_as_on_gpus, 2)
    assert first == second


def test_ranks_give_up_a_window_together_though_one_alone_runs_out_of_memory():
    first, second = run_ranks(on_two_ranks, 2, timeout=120.0)
    assert first == second


def test_a_resumed_run_begins_with_the_size_that_was_found():
    first = Large(5)
    settings = {"callbacks": [Checkpoint()], "max_duration": "2step"}
    fit(SingleStrategy(device="cpu", micro_batch_size="auto"), first, **settings)
    again, whole = Large(5), Large(5)
    trainer = Trainer(
        SingleStrategy(device="cpu", micro_batch_size="auto"), max_duration="5step", callbacks=[], loggers=[]
    )
    trainer.fit(again, data(), resume="run")
    assert max(again.sizes) == 4
    fit(SingleStrategy(device="cpu", micro_batch_size=4), whole, max_duration="5step", run_dir="whole")
    assert_same_bits(again, whole)


def test_what_does_not_fit_one_by_one_is_an_error():
    with pytest.raises(UserError, match="does not fit into memory with one sample at a time"):
        fit(SingleStrategy(device="cpu", micro_batch_size="auto"), Large(0, norm=False))


def test_without_auto_the_error_is_torchs_own():
    with pytest.raises(torch.OutOfMemoryError):
        fit(SingleStrategy(device="cpu"), Large(5))


@pytest.mark.parametrize(
    "make",
    [
        lambda: TorchDDPStrategy(micro_batch_size="auto"),
        lambda: PipelineStrategy(micro_batch_size="auto"),
        lambda: SingleStrategy(micro_batch_size="auto", accumulate=2),
        lambda: DDPStrategy(micro_batch_size="auto", hook="fp16"),
        lambda: DDPStrategy(micro_batch_size="auto", overlap_optimizer=True),
        lambda: FusionStrategy(micro_batch_size="auto", shard_optimizer=True),
        lambda: SingleStrategy(micro_batch_size="some"),
    ],
)
def test_what_cannot_give_up_a_window_says_so(make):
    with pytest.raises(UserError, match="micro_batch_size"):
        make()


def test_a_window_is_cut_again_by_rows_and_never_wrongly():
    batch = {"rows": torch.arange(10), "scale": torch.tensor(2.0), "pair": (torch.ones(10, 2), 3)}
    step_batch = resplit(StepBatch([MicroBatch(batch, 10)], 10, 10, False), 4)
    assert [part.num_samples for part in step_batch.micro_batches] == [4, 4, 2]
    assert torch.cat([part.batch["rows"] for part in step_batch.micro_batches]).tolist() == list(range(10))
    assert step_batch.micro_batches[2].batch["pair"][0].shape == (2, 2)
    for wrong in ({"words": ["a"] * 10}, [torch.ones(10), torch.ones(7)]):
        with pytest.raises(UserError, match="cannot split a batch of 10 samples that holds"):
            resplit(StepBatch([MicroBatch(wrong, 10)], 10, 10, False), 4)
