"""Gradients that ddp sends in 16 bits: between ranks or between hosts."""

from __future__ import annotations

import os
import socket
import struct

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import TensorDataset
from trainkit.strategies.ddp import DDPStrategy
from trainkit.strategies.fusion.strategy import FusionStrategy
from trainkit.strategies.single import SingleStrategy

from tests.equality import StepWeights, largest_difference, numbers
from tests.strategies.fusion.training import (
    SMALL_BUFFER,
    Drift,
    Overflowing,
    Partly,
    Wide,
    pretend_hosts,
    train,
    trained,
)
from tests.tasks import Recorder
from trainkit import Data, UserError
from trainkit.distributed.collectives import gather
from trainkit.testing import run_ranks

ROUNDED = {"device": "cpu", "reduce_dtype": "bf16", "bucket_cap_mb": SMALL_BUFFER}
BETWEEN_RANKS = {"transport": "process_group"}
ARRANGEMENTS = {
    2: {
        "ranks": BETWEEN_RANKS,
        "ranks, fp16": {**BETWEEN_RANKS, "reduce_dtype": "fp16"},
        "ranks, in backward": {**BETWEEN_RANKS, "optimizer_in_backward": True},
    },
    3: {"ranks": BETWEEN_RANKS, "uneven hosts": {}},
    4: {
        "ranks": BETWEEN_RANKS,
        "hosts": {},
        "hosts, fp16": {"reduce_dtype": "fp16"},
        "hosts, in backward": {"optimizer_in_backward": True},
    },
}


class TransportRecorder(Recorder):
    def on_step_end(self, run):
        self.name = type(run.strategy.gradients.reducer.transport).__name__


def trained_on_this_rank(run_dir):
    """Return by arrangement the difference from single, and if all ranks have the same weights after each step."""
    single = trained(SingleStrategy(device="cpu"), "perceptron", run_dir=run_dir / f"single_{dist.get_rank()}")
    pretend_hosts(2)
    found = {}
    for name, settings in ARRANGEMENTS[dist.get_world_size()].items():
        recorder = TransportRecorder()
        ours = trained(DDPStrategy(**ROUNDED | settings), "perceptron", recorder, run_dir=run_dir / name)
        hosts_share_memory = name.startswith("hosts")
        assert recorder.name == ("HierarchicalTransport" if hosts_share_memory else "HalfPrecisionTransport"), name
        same = all(largest_difference(others, ours) == 0.0 for others in gather(ours, dist.group.WORLD))
        found[name] = largest_difference(ours, single), same
    return found


@pytest.mark.parametrize("num_ranks", [2, pytest.param(3, marks=pytest.mark.slow), 4])
def test_every_rank_has_the_same_weights_near_those_of_one_device(num_ranks, tmp_path):
    for found in run_ranks(trained_on_this_rank, num_ranks, tmp_path):
        assert len(found) == len(ARRANGEMENTS[num_ranks])
        for name, (difference, same) in found.items():
            assert 1e-6 < difference < 3e-2, name
            assert same, name


def differences_in_shared_memory(run_dir):
    """Return the difference of weights between runs on one host without `reduce_dtype` and with it."""
    strategies = DDPStrategy(device="cpu"), DDPStrategy(**ROUNDED)
    return largest_difference(*(trained(strategy, "perceptron", run_dir=run_dir) for strategy in strategies))


def test_ranks_that_share_memory_round_nothing(tmp_path):
    assert run_ranks(differences_in_shared_memory, 2, tmp_path) == [0.0, 0.0]


class Advice(Recorder):
    def on_step_end(self, run):
        self.found = run.strategy.gradients.timeline.compressed


def advised(run_dir):
    """Return the setting that the timeline advises: in shared memory, between ranks, and if it is set."""
    found = []
    for settings in ({}, BETWEEN_RANKS, {**BETWEEN_RANKS, "reduce_dtype": "bf16"}):
        advice = Advice()
        trained(DDPStrategy(device="cpu", record_timeline=True, **settings), "perceptron", advice, run_dir=run_dir)
        found.append(advice.found)
    return found


def test_the_timeline_advises_to_round_only_what_is_sent_unrounded(tmp_path):
    assert run_ranks(advised, 2, tmp_path) == [["", "strategy.reduce_dtype=bf16", ""]] * 2


# ---- Bytes


_RECEIVED = 128  # offset of the bytes in Linux's struct tcp_info


class Received(Recorder):
    """Keeps the bytes that this process has received through sockets from the third step to the last one.

    What a step has used has been received, where its last bytes may not have been sent yet.
    """

    def on_step_end(self, run):
        if run.state.step == 2:
            self.before = bytes_received()
        self.num_bytes = bytes_received() - getattr(self, "before", 0)


def bytes_received() -> int:
    total = 0
    for name in os.listdir("/proc/self/fd"):
        try:
            if os.readlink(f"/proc/self/fd/{name}").startswith("socket:"):
                with socket.socket(fileno=os.dup(int(name))) as connection:
                    info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 256)
                    total += struct.unpack_from("Q", info, _RECEIVED)[0]
        except OSError:  # closed meanwhile, or of another kind
            continue
    return total


class Large(Wide):
    def build(self):
        self.network = nn.Sequential(nn.Linear(8, 30_000), nn.Tanh(), nn.Linear(30_000, 1))


def bytes_between_hosts(run_dir):
    pretend_hosts(2)
    found = {}
    for reduce_dtype in (None, "bf16"):
        received = Received()
        strategy = DDPStrategy(device="cpu", bucket_cap_mb=1, reduce_dtype=reduce_dtype)
        train(strategy, Large(), Data(train=numbers(24), batch_size=4), received, run_dir=run_dir, steps=6)
        found[reduce_dtype] = received.num_bytes
    return found


@pytest.mark.skipif(not hasattr(socket, "TCP_INFO"), reason="bytes of a connection are counted on Linux")
def test_half_of_the_bytes_are_sent_between_hosts(tmp_path):
    shard = 300_001 * 4 / 2  # of the gradients, which a rank exchanges with one other
    for found in run_ranks(bytes_between_hosts, 4, tmp_path):
        assert found == {None: pytest.approx(4 * shard, rel=0.02), "bf16": pytest.approx(2 * shard, rel=0.02)}


# ---- Parameters that not every rank uses, and sparse gradients


def partly_used(run_dir):
    """Return by arrangement the difference from single of a task with parameters that only some ranks use."""
    single = StepWeights()
    data = Data(train=numbers(16), batch_size=4)
    alone = SingleStrategy(device="cpu", accumulate=dist.get_world_size())
    train(alone, Partly(), data, single, run_dir=run_dir / f"single_{dist.get_rank()}", steps=8)
    pretend_hosts(2)
    found = {}
    for name, settings in {"hosts": {}, "ranks": BETWEEN_RANKS}.items():
        seen = StepWeights()
        train(DDPStrategy(**ROUNDED | settings), Partly(), data, seen, run_dir=run_dir / name, steps=8)
        unused = [weights for weights in seen.steps[-1] if "third" in weights]
        assert unused
        found[name] = (
            largest_difference(seen.steps, single.steps),
            max((seen.steps[-1][key] - single.steps[-1][key]).abs().max().item() for key in unused),
        )
    return found


def test_parameters_that_some_or_no_ranks_use_are_updated_as_on_one_device(tmp_path):
    for found in run_ranks(partly_used, 4, tmp_path):
        for name, (difference, of_unused) in found.items():
            assert 0 < difference < 1e-2, name
            assert of_unused == 0.0, name


class Sparse(Drift):
    """Its embedding has sparse gradients, which arrive last."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(50, 3, sparse=True)

    def training_step(self, batch):
        words = (batch[0][:, :5] * 49).long() % 50
        return super().training_step(batch) + (self.embedding(words) * batch[0][:, :1, None]).mean()


def sparse_weights(run_dir):
    """Return the embedding and the other weights, exact and rounded."""
    pretend_hosts(2)
    samples = torch.rand(24, 307, generator=torch.Generator().manual_seed(1)) + 1.0
    found = []
    for settings in ({**ROUNDED, "reduce_dtype": None}, ROUNDED):
        torch.manual_seed(0)
        task = Sparse()
        train(DDPStrategy(**settings), task, Data(train=TensorDataset(samples), batch_size=4), run_dir=run_dir)
        found.append((task.embedding.weight.detach(), task.long.detach()))
    return found


def test_sparse_gradients_are_sent_exactly(tmp_path):
    for exact, rounded in run_ranks(sparse_weights, 4, tmp_path):
        torch.testing.assert_close(rounded[0], exact[0], rtol=0, atol=1e-7)
        assert not torch.equal(rounded[1], exact[1])


# ---- Gradients that overflow


def train_in_fp16(run_dir, settings, on_nonfinite):
    task = Overflowing()
    strategy = DDPStrategy(**ROUNDED | {"reduce_dtype": "fp16"} | settings)
    data = Data(train=TensorDataset(torch.ones(24, 307)), batch_size=4)
    train(strategy, task, data, run_dir=run_dir, on_nonfinite=on_nonfinite)
    return torch.cat([task.long, task.short]).detach()


def overflowed(run_dir):
    """Return the errors of runs with on_nonfinite=raise, and the weights of those that skip."""
    pretend_hosts(2)
    messages, weights = [], []
    for number, settings in enumerate((BETWEEN_RANKS, {})):
        with pytest.raises(Exception, match="not finite") as caught:
            train_in_fp16(run_dir / f"raise {number}", settings, "raise")
        messages.append(str(caught.value))
        weights.append(train_in_fp16(run_dir / f"skip {number}", settings, "skip"))
    return messages, weights


@pytest.mark.slow
def test_gradients_that_overflow_in_fp16_are_not_finite_and_leave_nothing_behind(tmp_path):
    for messages, weights in run_ranks(overflowed, 4, tmp_path):
        assert len(messages) == 2 and all("long" in message for message in messages)
        for last in weights:  # five of six steps
            torch.testing.assert_close(last, torch.full((307,), -5.0))


@pytest.mark.parametrize("kind", [DDPStrategy, FusionStrategy])
def test_gradients_that_overflow_in_fp16_may_not_be_clipped_by_value(kind, tmp_path):
    strategy, data = kind(device="cpu", devices=1, reduce_dtype="fp16"), Data(train=numbers(4), batch_size=2)
    with pytest.raises(UserError, match=r"max_grad_value would make finite gradients .* strategy\.reduce_dtype=bf16"):
        train(strategy, Wide(), data, run_dir=tmp_path, max_grad_value=1.0)
