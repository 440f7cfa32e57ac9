"""The strategy `fusion` trains to the weights of one device with every transport and setting."""

from __future__ import annotations

import itertools
import json
import math
import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import TensorDataset
from trainkit.strategies.ddp.strategy import DDPStrategy
from trainkit.strategies.fusion.strategy import FusionStrategy
from trainkit.strategies.single import SingleStrategy
from trainkit.strategies.transports import gloo_ring as exchange_module
from trainkit.strategies.transports.gloo_ring import GlooExchange, TransferWork
from trainkit.strategies.transports.hosts import OwnGroups
from trainkit.strategies.transports.sharded import FusionSettings, open_server_groups, ordered_sum

from tests.equality import Perceptron, StepWeights, largest_difference, make, numbers
from tests.marks import in_make_zoo
from tests.strategies.fusion.training import (
    OPTIMIZERS,
    SMALL_BUFFER,
    Drift,
    Overflowing,
    Partly,
    Wide,
    imbalance,
    naive_bytes_per_server,
    train,
    trained,
)
from tests.tasks import EachStep, Recorder, StopAt
from trainkit import Data, UserError
from trainkit.distributed.failure_store import RankError
from trainkit.testing import run_ranks

CASES = list(itertools.product(("perceptron", "plain_conv_net", "gpt"), OPTIMIZERS))


def settings_of(name):
    # In fp32 the rounding of another processor may reach any bound.
    return {"precision": "fp64"} | ({"max_grad_norm": 0.05} if name == "perceptron" else {})


@pytest.fixture(scope="module")
def steps_of_single(tmp_path_factory):
    """The weights of one device after every step of each task and optimizer."""
    folder = tmp_path_factory.mktemp("single")
    return {
        (name, optimizer): trained(
            SingleStrategy(device="cpu"), name, optimizer=optimizer, run_dir=folder, **settings_of(name)
        )
        for name, optimizer in CASES
    }


def differences_on_this_rank(transport, run_dir, steps_of_single):
    """Return the largest difference from `single` for each task, optimizer and setting."""
    found = {}
    for name, optimizer in CASES:
        for shard, accumulate in ((False, None), (True, None), (True, 2)):
            if accumulate and dist.get_world_size() * accumulate > 6:
                continue
            strategy = FusionStrategy(
                device="cpu",
                transport=transport,
                buffer_mb=0.0005,  # 131 numbers: parameters span chunks
                max_in_flight=2,
                shard_optimizer=shard,
                accumulate=accumulate,
            )
            ours = trained(strategy, name, optimizer=optimizer, run_dir=run_dir / "fusion", **settings_of(name))
            difference = largest_difference(ours, steps_of_single[name, optimizer])
            found[f"{name} {optimizer} shard={shard} accumulate={accumulate}"] = difference
    return found


@pytest.mark.parametrize(
    ("num_ranks", "transport"),
    [
        (2, "shared_memory"),
        pytest.param(3, "exchange", marks=pytest.mark.slow),
        pytest.param(3, "shared_memory", marks=[pytest.mark.slow, in_make_zoo]),
        pytest.param(2, "exchange", marks=[pytest.mark.slow, in_make_zoo]),
    ],
)
def test_weights_equal_those_of_one_device_at_every_step(num_ranks, transport, steps_of_single, tmp_path):
    for found in run_ranks(differences_on_this_rank, num_ranks, transport, tmp_path, steps_of_single, timeout=150):
        assert len(found) == 18
        for key, difference in found.items():
            assert difference < 1e-10, key


# ---- The optimizer's state


def load_state(path):
    """Return the task's weights and the optimizer's state of the last checkpoint in a run's folder."""
    from trainkit.checkpoint.store import load_from

    payload = load_from(path).payload
    return payload["task"], payload["optimizer"]


def resumed_across(run_dir):
    """Train 6 steps under single, sharded fusion, plain fusion and single again, and without a stop."""
    rank = dist.get_rank()

    def fresh():
        task = Perceptron()
        task.configure_optimizers = lambda: OPTIMIZERS["adamw"](task)
        return task, Data(train=numbers(13), batch_size=6)

    whole = StepWeights()
    train(SingleStrategy(device="cpu"), *fresh(), whole, run_dir=run_dir / f"whole_{rank}", steps=8, precision="fp64")
    stopped = run_dir / "stopped"
    bytes_kept = []
    if rank == 0:
        train(SingleStrategy(device="cpu"), *fresh(), StopAt(2), run_dir=stopped, steps=8, precision="fp64")
    dist.barrier()
    for stop, shard in ((4, True), (6, False), (7, True)):
        strategy = FusionStrategy(device="cpu", buffer_mb=0.0005, shard_optimizer=shard)
        task, data = fresh()
        kept = state_bytes()
        train(strategy, task, data, StopAt(stop), kept, run_dir=stopped, resume=stopped, steps=8, precision="fp64")
        bytes_kept.append(kept.seen[-1])
        dist.barrier()
    last = StepWeights()
    alone = run_dir / f"alone_{rank}"
    train(SingleStrategy(device="cpu"), *fresh(), last, run_dir=alone, resume=stopped, steps=8, precision="fp64")
    _, optimizer = load_state(stopped)
    shapes = [tuple(state["exp_avg"].shape) for state in optimizer["state"].values()]
    return largest_difference(last.steps[-1:], whole.steps[-1:]), shapes, bytes_kept


def state_bytes():
    """Return a callback that keeps the size of this rank's optimizer state."""

    def look(run):
        state = run.phase_optimizer.optimizer.state
        return sum(value.nbytes for kept in state.values() for value in kept.values())

    return EachStep(look)


def test_checkpoints_of_a_sharded_optimizer_are_full_and_resume_under_other_strategies(tmp_path):
    full = [tuple(parameter.shape) for parameter in Perceptron().parameters()]
    grouped = [shape for shape in full if len(shape) > 1] + [shape for shape in full if len(shape) == 1]
    for difference, shapes, (sharded, plain, _) in run_ranks(resumed_across, 2, tmp_path):
        assert difference < 1e-10
        assert shapes == grouped
        assert 0.45 * plain < sharded < 0.65 * plain  # two ranks: half of the state, and a step count for each shard


class Scaled(Perceptron):
    """Has a parameter that is a single number."""

    def build(self):
        super().build()
        self.scale = nn.Parameter(torch.tensor(1.0))

    def training_step(self, batch):
        return super().training_step(batch)["loss"] * self.scale


def resumed_exactly(run_dir):
    """Train 6 steps without and with a resume under sharded fusion; return the weights of both."""
    ends = []
    for name, stops in (("whole", []), ("resumed", [3])):
        for stop in [*stops, None]:
            task = Scaled()
            task.configure_optimizers = lambda task=task: OPTIMIZERS["adamw"](task)
            strategy = FusionStrategy(device="cpu", shard_optimizer=True)
            callbacks = [] if stop is None else [StopAt(stop)]
            resume = run_dir / name if name == "resumed" and stop is None else None
            data = Data(train=numbers(13), batch_size=6)
            train(strategy, task, data, *callbacks, run_dir=run_dir / name, resume=resume)
        ends.append({name: tensor.clone() for name, tensor in task.state_dict().items()})
    return ends


def test_a_resumed_run_is_bit_equal_to_an_uninterrupted_one(tmp_path):
    for whole, resumed in run_ranks(resumed_exactly, 2, tmp_path):
        assert all(torch.equal(whole[name], resumed[name]) for name in whole)


def with_momentum_from_the_start(run_dir):
    """Return the state's bytes, the difference from single, and whether parameters leave the flat weights at the end.

    The fused kernel makes its buffers before the first step.
    """
    task, data = make("perceptron", 13, batch_size=6)
    task.configure_optimizers = lambda: OPTIMIZERS["sgd"](task)
    kept, seen = state_bytes(), StepWeights()
    strategy = FusionStrategy(device="cpu", shard_optimizer=True)
    train(strategy, task, data, kept, seen, run_dir=run_dir / "fusion", on_nonfinite="skip", steps=4)
    own_memory = all(p.untyped_storage().nbytes() == p.nbytes for p in task.parameters())
    alone = run_dir / f"single_{dist.get_rank()}"
    single = trained(SingleStrategy(device="cpu"), "perceptron", run_dir=alone, on_nonfinite="skip")
    return kept.seen[-1], largest_difference(seen.steps, single), own_memory


def test_each_rank_keeps_only_its_shard_of_the_momentum(tmp_path):
    whole = sum(parameter.nbytes for parameter in Perceptron().parameters())
    for kept, difference, own_memory in run_ranks(with_momentum_from_the_start, 2, tmp_path):
        assert 0.45 * whole < kept < 0.55 * whole
        assert difference < 1e-6
        assert own_memory


class EarlyReader(Perceptron):
    """Reads a weight of its last layer in an early one as well, without a gradient."""

    def build(self):
        self.first, self.last = nn.Linear(8, 8), nn.Linear(8, 8)

    def training_step(self, batch):
        hidden = self.first(batch[0]) @ self.last.weight.detach()  # its backward comes after that of the last layer
        return (self.last(hidden).sum(1, keepdim=True) - batch[1]).square().mean()


def clamp(run):
    """Change the weights in place."""
    with torch.no_grad():
        for parameter in run.task.parameters():
            parameter.clamp_(-0.2, 0.2)


class StepRecorder(Recorder):
    """Records whether servers step in backward."""

    def __init__(self):
        super().__init__()
        self.in_backward = []

    def on_fit_start(self, run):
        self._record(run)

    def on_step_end(self, run):
        self._record(run)

    def _record(self, run):
        self.in_backward.append(run.strategy._transport.on_summed is not None)  # in the step that follows


def steps_in_backward(run_dir):
    """Return the differences from single and the steps in which servers stepped in backward, by task and setting."""
    found = {}
    for name, task, settings in (
        ("early reader", EarlyReader, {}),
        ("clamped", Perceptron, {}),
        ("clipped", Perceptron, {"max_grad_norm": 0.1}),
        ("norm logged", Perceptron, {"max_grad_norm": math.inf}),
        ("skips", Perceptron, {"on_nonfinite": "skip"}),
        ("after", Perceptron, {}),
    ):
        steps = []
        for strategy in (
            SingleStrategy(device="cpu"),
            FusionStrategy(
                device="cpu",
                shard_optimizer=True,
                optimizer_in_backward=False if name == "after" else "auto",
                buffer_mb=0.0005,
            ),
        ):
            seen, recorder = StepWeights(), StepRecorder()
            folder = run_dir / (f"single_{dist.get_rank()}" if not steps else "fusion")
            others = [EachStep(clamp)] if name == "clamped" else []
            if steps:
                others.append(recorder)
            data = Data(train=numbers(24), batch_size=6)
            train(strategy, task(lr=0.02), data, *others, seen, run_dir=folder, precision="fp64", **settings)
            steps.append(seen.steps)
        found[name] = (largest_difference(steps[1], steps[0]), recorder.in_backward)
    return found


@pytest.mark.slow
def test_servers_step_in_backward_unless_all_gradients_are_needed_first(tmp_path):
    for found in run_ranks(steps_in_backward, 2, tmp_path):
        assert max(difference for difference, _ in found.values()) < 1e-10
        # The first backward shows where the buffers are.
        assert found["early reader"][1] == found["clamped"][1] == found["norm logged"][1] == [False] + 6 * [True]
        assert found["clipped"][1] == found["skips"][1] == found["after"][1] == 7 * [False]


# ---- Transfers


class EmptyStore:
    """A failure store without failures."""

    def root_cause(self):
        return None

    def note_waiting(self, where):
        pass


def chunks_in_flight(limit):
    """Return the most chunks of a buffer of more than ten in flight at once while the last rank is late."""
    exchange = open_exchange(FusionSettings(message_bytes=200, max_in_flight=limit, reduce_dtype=None, sharded=False))
    (flat,) = exchange.allocate([(2000, torch.float32)])
    flat.copy_(torch.arange(2000.0))
    store = dist.distributed_c10d._get_default_store()
    if dist.get_rank() == dist.get_world_size() - 1:
        store.wait(["chunks were counted"])
    reduction = exchange.start(0, where="the test")
    most = []
    while not reduction.is_done():
        exchange.progress()
        most.append(sum(not transfer.is_complete for transfer in exchange._in_flight))
        store.set("chunks were counted", "")
        time.sleep(0.001)
    reduction.wait()
    assert torch.equal(flat, dist.get_world_size() * torch.arange(2000.0))
    return max(most)


def open_exchange(settings, num_gradients=(1000,)):
    """Return an exchange between all ranks for buffers with these numbers of gradients, without failures."""
    groups = open_server_groups(
        [range(dist.get_world_size())], dist.group.WORLD, own_groups=OwnGroups(timedelta(seconds=60))
    )
    return GlooExchange(
        groups,
        failure_store=EmptyStore(),
        device=torch.device("cpu"),
        timeout_seconds=120.0,
        settings=settings,
        num_gradients=lambda: list(num_gradients),
    )


@pytest.mark.parametrize(("num_ranks", "limit", "expected"), [(2, 2, 2), (3, 4, 4)])
def test_no_more_chunks_are_in_flight_than_max_in_flight(num_ranks, limit, expected):
    assert max(run_ranks(chunks_in_flight, num_ranks, limit)) == expected


def calls_of_each_chunk():
    """Return for each chunk the receives that this rank announced and the sends that it started, in their order."""
    calls: dict[int, list[tuple[str, int]]] = {}
    num_hops = dist.get_world_size() - 1
    for name in ("receive", "send"):
        original = getattr(exchange_module, name)

        def recorded(tensor, group, *, tag, name=name, original=original, **peer):
            calls.setdefault(tag // 2 // num_hops, []).append((name, *peer.values()))
            return original(tensor, group, tag=tag, **peer)

        setattr(exchange_module, name, recorded)
    exchange = open_exchange(FusionSettings(message_bytes=200, max_in_flight=2, reduce_dtype=None, sharded=True))
    exchange.allocate([(1000, torch.float32)])
    exchange.start(0, where="the test").wait()
    exchange.close()
    return calls


@pytest.mark.parametrize("num_ranks", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_a_server_announces_what_it_receives_of_a_chunk_before_it_sends_and_sends_to_the_next_server_only(num_ranks):
    for rank, calls in enumerate(run_ranks(calls_of_each_chunk, num_ranks)):
        assert len(calls) == -(-1000 // (50 * num_ranks)), "50 numbers for each server"
        receives, sends = ("receive", (rank - 1) % num_ranks), ("send", (rank + 1) % num_ranks)
        hops = num_ranks - 1
        assert all(of_chunk == [receives] * hops + [sends] * hops for of_chunk in calls.values())


SIZES = [1, 2, 3, 7, 1000]


def sums_and_weights(sharded):
    """Return the sums of buffers of some sizes as this rank has them, and the weights that it gathered."""
    settings = FusionSettings(message_bytes=200, max_in_flight=2, reduce_dtype=None, sharded=sharded)
    exchange = open_exchange(settings, SIZES)
    flats = exchange.allocate([(size, torch.float32) for size in SIZES])
    rank, found = dist.get_rank(), []
    for buffer, flat in enumerate(flats):
        flat.copy_((rank + 1) * torch.arange(1.0, len(flat) + 1))
        exchange.start(buffer, where="the test").wait()
        if not sharded:
            found.append(flat)
            continue
        weights = torch.zeros_like(flat)
        for start, stop in exchange.own_ranges(buffer):
            weights[start:stop] = flat[start:stop]
        exchange.weight_sets[0][buffer].copy_(weights)
        exchange.gather_weights(buffer, where="the test").wait()
        found.append(exchange.weight_sets[0][buffer])
    found = [one.clone() for one in found]
    exchange.close()
    return found


@pytest.mark.parametrize("sharded", [False, True])
def test_sums_and_gathered_weights_are_those_of_all_ranks_for_buffers_of_any_size(sharded):
    for found in run_ranks(sums_and_weights, 3, sharded):
        for size, flat in zip(SIZES, found, strict=True):
            assert torch.equal(flat, 6 * torch.arange(1.0, size + 1))


def test_a_ring_has_messages_of_at_most_a_quarter_of_a_mib():
    assert FusionStrategy(device="cpu", shard_optimizer=True).fusion_settings.message_bytes == 2**18


def test_gloo_sums_chunks_of_at_most_a_mib_for_each_server():
    assert FusionStrategy(device="cpu", reduce_dtype="bf16").fusion_settings.message_bytes == 2**20


class BrokenFlags:
    """Flags of used parameters whose collective has ended because another rank has exited."""

    def is_done(self):
        return True

    def wait(self):
        raise RankError("a rank is gone")


def test_a_failed_collective_of_flags_raises():
    work = TransferWork(None, 0, "the test", [], BrokenFlags())
    with pytest.raises(RankError, match="a rank is gone"):
        work.advance()


def differences_in_16_bits(transport, run_dir):
    """Train with gradients sent in 16 bits, sharded and not; return differences from fp32 and between ranks."""
    found = {}
    exact = trained(SingleStrategy(device="cpu"), "perceptron", run_dir=run_dir / f"single_{dist.get_rank()}")
    for shard, dtype in itertools.product((False, True), ("bf16", "fp16")):
        strategy = FusionStrategy(
            device="cpu", transport=transport, reduce_dtype=dtype, shard_optimizer=shard, buffer_mb=0.0005
        )
        ours = trained(strategy, "perceptron", run_dir=run_dir / "fusion")
        found[shard, dtype] = (largest_difference(ours, exact), ours[-1])
    return found


@pytest.mark.parametrize("transport", ["shared_memory", pytest.param("exchange", marks=pytest.mark.slow)])
def test_gradients_in_16_bits_stay_close_and_ranks_stay_equal(transport, tmp_path):
    first, *others = run_ranks(differences_in_16_bits, 3, transport, tmp_path)
    for (shard, dtype), (difference, weights) in first.items():
        assert 1e-6 < difference < {"bf16": 2e-2, "fp16": 2e-3}[dtype]
        for other in others:
            assert all(torch.equal(weights[name], other[shard, dtype][1][name]) for name in weights)


def test_sums_of_bf16_are_made_in_fp32():
    shards = [torch.full((4,), 1.0 if rank == 0 else 1 / 512, dtype=torch.bfloat16) for rank in range(9)]
    assert ordered_sum(shards).tolist() == [1.0 + 8 / 512] * 4  # in bf16 every addition would be rounded away


class TooLargeInSum(Drift):
    """The gradients of each rank are below 65504, but their sum is not."""

    def training_step(self, batch):
        return super().training_step(batch) * 8e4


def train_in_fp16(task, run_dir, *, on_nonfinite="raise", **settings):
    """Return the last weights with gradients sent in fp16."""
    strategy = FusionStrategy(device="cpu", reduce_dtype="fp16", buffer_mb=SMALL_BUFFER, **settings)
    data = Data(train=TensorDataset(torch.ones(12, 307)), batch_size=4)
    train(strategy, task, data, run_dir=run_dir, on_nonfinite=on_nonfinite)
    return torch.cat([task.long, task.short]).detach()


def overflowed(run_dir):
    """Return the errors of runs with on_nonfinite=raise, and the weights of those that skip."""
    messages, weights = [], []
    for transport in ("shared_memory", "exchange"):
        case = run_dir / transport
        for task in (Overflowing, TooLargeInSum):
            with pytest.raises(Exception, match="not finite") as caught:
                train_in_fp16(task(), case / task.__name__, transport=transport)
            messages.append(str(caught.value))
        weights.append(train_in_fp16(Overflowing(), case / "skip", on_nonfinite="skip", transport=transport))
    weights.append(train_in_fp16(TooLargeInSum(), run_dir / "sharded", shard_optimizer=True) / 8e4 + 1.0)
    return messages, weights


@pytest.mark.slow
def test_gradients_that_overflow_in_fp16_are_not_finite_and_leave_nothing_behind(tmp_path):
    for messages, weights in run_ranks(overflowed, 2, tmp_path):
        assert len(messages) == 4 and all("long" in message for message in messages)
        for last in weights:  # five of six steps; sharded, a sum stays in fp32
            torch.testing.assert_close(last, torch.full((307,), -5.0))


def partly_used(run_dir):
    """Return the differences of sharded and plain fusion from single for a task with unused parameters."""
    found = []
    for strategy in (
        SingleStrategy(device="cpu", accumulate=dist.get_world_size()),
        FusionStrategy(device="cpu"),
        FusionStrategy(device="cpu", shard_optimizer=True),
        FusionStrategy(device="cpu", shard_optimizer=True, transport="exchange", buffer_mb=0.0005),
    ):
        seen = StepWeights()
        folder = f"{type(strategy).__name__}_{dist.get_rank()}" if strategy.accumulate else "fusion"
        data = Data(train=numbers(16), batch_size=2)
        train(strategy, Partly(), data, seen, run_dir=run_dir / folder, steps=16)
        found.append(seen.steps)
    return [largest_difference(steps, found[0]) for steps in found[1:]]


def test_partly_unused_parameters_are_trained_as_on_one_device(tmp_path):
    for differences in run_ranks(partly_used, 2, tmp_path):
        assert max(differences) < 1e-6


class Lopsided(Perceptron):
    """Has one huge and many tiny parameters."""

    def build(self):
        self.variables = nn.ParameterList([nn.Parameter(torch.ones(size)) for size in (300_000, *[100] * 200)])

    def training_step(self, batch):
        return torch.stack([variable.square().mean() for variable in self.variables]).sum() * batch[0].mean()


def bytes_on_this_rank(task, transports, run_dir):
    found = {}
    for transport, shard in itertools.product(transports, (False, True)):
        recorder = EachStep(lambda run: run.strategy.bytes_a_step)
        strategy = FusionStrategy(device="cpu", transport=transport, shard_optimizer=shard, buffer_mb=0.5)
        train(strategy, task(), Data(train=numbers(12), batch_size=6), recorder, run_dir=run_dir, steps=2)
        found[transport, shard] = recorder.seen[-1]
    return found


def test_every_rank_moves_about_the_same_number_of_bytes(tmp_path):
    numel = sum(parameter.numel() for parameter in Wide().parameters())
    for found in run_ranks(bytes_on_this_rank, 3, Wide, ("shared_memory", "exchange"), tmp_path):
        for moved in found.values():
            # Two thirds of all gradients to the servers, and as much back; flags and cache lines besides.
            assert moved == pytest.approx(2 * 2 / 3 * 4 * numel, rel=0.02)


@pytest.mark.slow
def test_the_busiest_server_moves_at_most_two_percent_more_than_the_mean(tmp_path):
    of_ranks = run_ranks(bytes_on_this_rank, 4, Lopsided, ("auto",), tmp_path)
    for shard in (False, True):
        moved = [found["auto", shard] for found in of_ranks]
        assert sum(moved) == pytest.approx(2 * 3 * 4 * 320_000, rel=0.02)
        assert imbalance(moved) <= 1.02
    assert imbalance(naive_bytes_per_server([300_000] + [100] * 200, 4)) > 3.5


def train_with_timeline(thread, run_dir):
    """Record the timeline of ten steps."""
    strategy = FusionStrategy(device="cpu", record_timeline=True, communication_thread=thread, buffer_mb=0.002)
    train(strategy, Wide(), Data(train=numbers(60), batch_size=6), run_dir=run_dir / str(thread), steps=10)


@pytest.mark.parametrize("thread", [False, True])
def test_the_timeline_has_the_hidden_share_of_communication(thread, tmp_path):
    run_ranks(train_with_timeline, 2, thread, tmp_path)
    for rank in (0, 1):
        trace = json.loads((tmp_path / str(thread) / f"timeline_rank_{rank}.json").read_text())
        assert 0.0 <= trace["otherData"]["hidden_share"] <= 1.0
        spans = [event for event in trace["traceEvents"] if "dur" in event]
        bars = [event for event in spans if str(event["tid"]).startswith("buffer")]
        assert len({event["tid"] for event in bars}) > 1
        # Small buffers were summed long before the rank waited for them.
        assert min(event["dur"] for event in bars) < max(event["dur"] for event in spans) / 3


# ---- Errors


class WholeNorm(torch.optim.SGD):
    """An optimizer that may need full parameters."""


def refused(run_dir):
    """Return the message for an optimizer that cannot be sharded."""
    task, data = make("perceptron", 12, batch_size=6)
    task.configure_optimizers = lambda: WholeNorm(task.parameters(), lr=0.1)
    with pytest.raises(UserError) as caught:
        train(FusionStrategy(device="cpu", shard_optimizer=True), task, data, run_dir=run_dir)
    return str(caught.value)


def test_an_optimizer_that_is_not_elementwise_cannot_be_sharded(tmp_path):
    (message,) = run_ranks(refused, 1, tmp_path)
    assert "WholeNorm may need full parameters" in message and "shard_optimizer=false" in message


class WithTable(Perceptron):
    """Adds rows of a table with sparse gradients to its outputs."""

    def build(self):
        super().build()
        self.table = nn.EmbeddingBag(10, 1, mode="sum", sparse=True)

    def training_step(self, batch):
        inputs, targets = batch
        outputs = self.network(inputs) + self.table((inputs[:, :2].abs() * 3).long())
        return (outputs - targets).square().mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


def with_sparse_gradients(run_dir):
    """Return the differences from single by transport, and the message of a sharded optimizer."""
    found = {}
    for transport in ("single", "shared_memory", "exchange"):
        strategy = FusionStrategy(device="cpu", transport=transport, buffer_mb=0.0005) if found else None
        folder = run_dir / ("fusion" if found else f"single_{dist.get_rank()}")
        seen = StepWeights()
        data = Data(train=numbers(13), batch_size=6)
        train(strategy or SingleStrategy(device="cpu"), WithTable(), data, seen, run_dir=folder)
        found[transport] = seen.steps
    with pytest.raises(UserError) as caught:
        train(FusionStrategy(device="cpu", shard_optimizer=True), WithTable(), data, run_dir=run_dir / "sharded")
    differences = [largest_difference(steps, found["single"]) for steps in found.values()]
    return differences, str(caught.value)


def test_sparse_gradients_are_summed_but_not_sharded(tmp_path):
    for differences, message in run_ranks(with_sparse_gradients, 2, tmp_path):
        assert len(differences) == 3 and max(differences) < 1e-6
        assert "table.weight has sparse gradients" in message and "strategy.shard_optimizer=false" in message


class OverflowingOnOne(Perceptron):
    """Its loss is too large for a scaled fp16 gradient in the third step, for rank 1 alone."""

    def training_step(self, batch):
        self.calls = getattr(self, "calls", 0) + 1
        huge = 1e9 if self.calls == 3 and dist.get_rank() == 1 else 1.0
        return super().training_step(batch)["loss"] * huge


def scaled(run_dir):
    """Return the largest difference between sharded fusion and ddp in fp16, and the steps that were skipped."""
    found = {}
    for name, strategy in (
        ("ddp", DDPStrategy(device="cpu")),
        ("rank", FusionStrategy(device="cpu", shard_optimizer=True)),
        ("host", FusionStrategy(device="cpu", shard_optimizer=True, servers="host")),
    ):
        seen, data = StepWeights(), Data(train=numbers(12), batch_size=6)
        train(
            strategy,
            OverflowingOnOne(),
            data,
            seen,
            run_dir=run_dir,
            precision="fp16-mixed",
            max_grad_norm=0.5,
            steps=8,
        )
        found[name] = seen.steps
    weights = [steps["network.0.weight"] for steps in found["ddp"]]
    skipped = [torch.equal(old, new) for old, new in itertools.pairwise(weights)]
    return [largest_difference(found[name], found["ddp"]) for name in ("rank", "host")], skipped


def test_all_servers_skip_a_step_if_a_gradient_overflows_on_one(tmp_path):
    for differences, skipped in run_ranks(scaled, 2, tmp_path):
        assert skipped[1] and not all(skipped)  # the third step
        assert max(differences) < 1e-6
