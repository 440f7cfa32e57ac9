"""Gradients that ddp sends in 16 bits: between ranks or between hosts, with and without error feedback."""

from __future__ import annotations

import os
import socket
import struct

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import TensorDataset
from trainkit.strategies.ddp import DDPStrategy, reductions
from trainkit.strategies.single import SingleStrategy

from tests.equality import StepWeights, largest_difference, numbers
from tests.strategies.fusion.training import (
    SMALL_BUFFER,
    STOP,
    Drift,
    Partly,
    Wide,
    drifted,
    exact_weights,
    train,
    trained,
)
from tests.tasks import Recorder, StopAt
from trainkit import Data
from trainkit.distributed.collectives import gather
from trainkit.testing import run_ranks

ROUNDED = {"device": "cpu", "reduce_dtype": "bf16", "bucket_cap_mb": SMALL_BUFFER}
FEEDBACK = {**ROUNDED, "error_feedback": True}
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


def pretend_hosts() -> None:
    """Treat every two ranks as a host."""
    reductions.host_name = lambda: f"host {dist.get_rank() // 2}"


class TransportRecorder(Recorder):
    def on_step_end(self, run):
        self.name = type(run.strategy.reducer.transport).__name__


def weights_and_errors(run_dir, exact):
    """Return by arrangement the distances from exact weights, with and without the last errors."""
    pretend_hosts()
    found = {}
    for name, settings in ARRANGEMENTS[dist.get_world_size()].items():
        recorder = TransportRecorder()
        weights, errors = drifted(DDPStrategy(**FEEDBACK | settings), run_dir / name, recorder)
        hosts_share_memory = name.startswith("hosts")
        assert recorder.name == ("HierarchicalTransport" if hosts_share_memory else "HalfPrecisionTransport"), name
        assert all(torch.equal(weights, others) for others in gather(weights, dist.group.WORLD)), name
        found[name] = [(w - exact).abs().max().item() for w in (weights, weights - errors.last)]
    return found


@pytest.mark.parametrize("num_ranks", [2, pytest.param(3, marks=pytest.mark.slow), 4])
def test_all_that_was_applied_is_the_sum_of_gradients_but_for_the_last_errors(num_ranks, tmp_path):
    exact = exact_weights(tmp_path / "single")
    for found in run_ranks(weights_and_errors, num_ranks, tmp_path, exact):
        assert len(found) == len(ARRANGEMENTS[num_ranks])
        for name, (distance, without_errors) in found.items():
            assert distance > 1e-5, f"{name}: something is left to send"
            assert without_errors < 1e-6, name


def trained_on_this_rank(run_dir):
    """Return by arrangement the difference from single, and if all ranks have the same weights after each step."""
    single = trained(SingleStrategy(device="cpu"), "perceptron", run_dir=run_dir / f"single_{dist.get_rank()}")
    pretend_hosts()
    found = {}
    for name, settings in ARRANGEMENTS[dist.get_world_size()].items():
        ours = trained(DDPStrategy(**ROUNDED | settings), "perceptron", run_dir=run_dir / name)
        same = all(largest_difference(others, ours) == 0.0 for others in gather(ours, dist.group.WORLD))
        found[name] = largest_difference(ours, single), same
    return found


@pytest.mark.parametrize("num_ranks", [2, 4])
def test_every_rank_has_the_same_weights_near_those_of_one_device(num_ranks, tmp_path):
    for found in run_ranks(trained_on_this_rank, num_ranks, tmp_path):
        for name, (difference, same) in found.items():
            assert 1e-6 < difference < 3e-2, name
            assert same, name


def distances_from_exact(run_dir, exact):
    """Return the distances from exact weights with error feedback and without it."""
    pretend_hosts()
    both = [DDPStrategy(**FEEDBACK | {"error_feedback": feedback}) for feedback in (True, False)]
    return [(drifted(strategy, run_dir)[0] - exact).norm().item() for strategy in both]


@pytest.mark.slow
def test_with_error_feedback_weights_are_nearer_to_those_of_one_device(tmp_path):
    exact = exact_weights(tmp_path / "single")
    for with_feedback, without in run_ranks(distances_from_exact, 4, tmp_path / "ddp", exact):
        assert 0 < with_feedback < without / 2


class SavedErrors(Recorder):
    """Keeps the errors that a checkpoint of the last step would have, of all ranks."""

    def on_step_end(self, run):
        states = run.strategy.strategy_state().get("hook_states") or []
        self.errors = [state["hooks"][""]["errors"] for state in states]


def in_shared_memory(run_dir):
    """Return the weights of runs on one host without reduce_dtype, with it, and with error feedback, and its errors."""
    saved = SavedErrors()
    runs = [drifted(DDPStrategy(**settings), run_dir, saved)[0] for settings in ({"device": "cpu"}, ROUNDED, FEEDBACK)]
    return runs, saved.errors


def test_ranks_that_share_memory_round_nothing_and_save_no_errors(tmp_path):
    first, second = run_ranks(in_shared_memory, 2, tmp_path)
    for (exact, rounded, feedback), _ in (first, second):
        assert torch.equal(exact, rounded) and torch.equal(exact, feedback)
    assert first[1] == [{}, {}]


class Advice(Recorder):
    def on_step_end(self, run):
        self.found = run.strategy.timeline.compressed


def advised(run_dir):
    """Return the setting that the timeline advises: in shared memory, between ranks, and if it is set."""
    found = []
    for settings in ({}, BETWEEN_RANKS, {**BETWEEN_RANKS, "reduce_dtype": "bf16"}):
        advice = Advice()
        drifted(DDPStrategy(device="cpu", record_timeline=True, **settings), run_dir, advice)
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
    pretend_hosts()
    found = {}
    cases = {"exact": {"reduce_dtype": None}, "rounded": {}, "feedback": {"error_feedback": True}}
    for name, settings in cases.items():
        received = Received()
        strategy = DDPStrategy(**ROUNDED | {"bucket_cap_mb": 1} | settings)
        train(strategy, Large(), Data(train=numbers(24), batch_size=4), received, run_dir=run_dir / name, steps=6)
        found[name] = received.num_bytes
    return found


@pytest.mark.skipif(not hasattr(socket, "TCP_INFO"), reason="bytes of a connection are counted on Linux")
def test_half_of_the_bytes_are_sent_between_hosts(tmp_path):
    shard = 300_001 * 4 / 2  # of the gradients, which a rank exchanges with one other
    for found in run_ranks(bytes_between_hosts, 4, tmp_path):
        assert found["exact"] == pytest.approx(4 * shard, rel=0.02)
        for name in ("rounded", "feedback"):
            assert found[name] == pytest.approx(2 * shard, rel=0.02), name


# ---- Parameters that not every rank uses, and sparse gradients


def partly_used(run_dir):
    """Return by arrangement the difference from single of a task with parameters that only some ranks use."""
    single = StepWeights()
    data = Data(train=numbers(16), batch_size=4)
    alone = SingleStrategy(device="cpu", accumulate=dist.get_world_size())
    train(alone, Partly(), data, single, run_dir=run_dir / f"single_{dist.get_rank()}", steps=8)
    pretend_hosts()
    found = {}
    for name, settings in {"plain": {}, "feedback": {"error_feedback": True}, "ranks": BETWEEN_RANKS}.items():
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
    """Return the embedding and the other weights, exact, rounded and with error feedback."""
    pretend_hosts()
    samples = torch.rand(24, 307, generator=torch.Generator().manual_seed(1)) + 1.0
    found = []
    for settings in ({**ROUNDED, "reduce_dtype": None}, ROUNDED, FEEDBACK):
        torch.manual_seed(0)
        task = Sparse()
        train(DDPStrategy(**settings), task, Data(train=TensorDataset(samples), batch_size=4), run_dir=run_dir)
        found.append((task.embedding.weight.detach(), task.long.detach()))
    return found


def test_sparse_gradients_are_sent_exactly(tmp_path):
    for exact, rounded, feedback in run_ranks(sparse_weights, 4, tmp_path):
        for embedding, dense in (rounded, feedback):
            torch.testing.assert_close(embedding, exact[0], rtol=0, atol=1e-7)
            assert not torch.equal(dense, exact[1])


# ---- Checkpoints


def resumed_and_whole(run_dir):
    """Return the last weights of a resumed and of a whole run on two hosts."""
    pretend_hosts()
    whole, _ = drifted(DDPStrategy(**FEEDBACK), run_dir / "whole", precision="fp32")
    part = run_dir / "part"
    drifted(DDPStrategy(**FEEDBACK), part, StopAt(STOP), precision="fp32")
    resumed, errors = drifted(DDPStrategy(**FEEDBACK), part, resume=part, precision="fp32")
    return resumed, whole, errors.first


def test_a_resumed_run_on_several_hosts_is_equal_to_the_bit(tmp_path):
    for resumed, whole, first in run_ranks(resumed_and_whole, 4, tmp_path):
        assert torch.equal(resumed, whole)
        assert first.abs().max() > 1e-5


def saved_on_hosts(run_dir):
    pretend_hosts()
    return drifted(DDPStrategy(**FEEDBACK), run_dir, StopAt(STOP))[1].saved


def resumed_on_one_host(saved, run_dir):
    """Return the first errors, and the last weights and errors of ranks that share memory."""
    weights, errors = drifted(DDPStrategy(**FEEDBACK), run_dir, resume=saved)
    return errors.first, weights, errors.last


@pytest.mark.slow
def test_ranks_that_share_memory_apply_the_errors_of_a_checkpoint_once(tmp_path):
    exact, saved = exact_weights(tmp_path / "single"), tmp_path / "saved"
    before = run_ranks(saved_on_hosts, 4, saved)[0]
    for first, weights, last in run_ranks(resumed_on_one_host, 2, saved, tmp_path / "resumed"):
        torch.testing.assert_close(first, before)
        torch.testing.assert_close(weights, exact, rtol=0, atol=1e-6)
        assert not last.any()


# ---- Gradients that overflow


class Overflowing(Drift):
    """Its gradients are finite, but those of rank 1 are above 65504 in the third step."""

    def training_step(self, batch):
        self.calls = getattr(self, "calls", 0) + 1
        return super().training_step(batch) * (1e6 if self.calls == 3 and dist.get_rank() == 1 else 1.0)


def train_in_fp16(run_dir, settings, on_nonfinite):
    task = Overflowing()
    strategy = DDPStrategy(**ROUNDED | {"reduce_dtype": "fp16"} | settings)
    data = Data(train=TensorDataset(torch.ones(24, 307)), batch_size=4)
    train(strategy, task, data, run_dir=run_dir, on_nonfinite=on_nonfinite)
    return torch.cat([task.long, task.short]).detach()


def overflowed(run_dir):
    """Return the errors of runs with on_nonfinite=raise, and the weights of those that skip."""
    pretend_hosts()
    messages, weights = [], []
    for number, settings in enumerate((BETWEEN_RANKS, {})):
        for feedback in (False, True):
            both = {**settings, "error_feedback": feedback}
            with pytest.raises(Exception, match="not finite") as caught:
                train_in_fp16(run_dir / f"raise {number} {feedback}", both, "raise")
            messages.append(str(caught.value))
            weights.append(train_in_fp16(run_dir / f"skip {number} {feedback}", both, "skip"))
    return messages, weights


@pytest.mark.slow
def test_gradients_that_overflow_in_fp16_are_not_finite_and_leave_no_error(tmp_path):
    for messages, weights in run_ranks(overflowed, 4, tmp_path):
        assert len(messages) == 4 and all("long" in message for message in messages)
        for last in weights:  # five of six steps
            torch.testing.assert_close(last, torch.full((307,), -5.0))
