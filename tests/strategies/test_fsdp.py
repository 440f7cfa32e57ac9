"""The strategy `fsdp`: the weights of one device, state that every strategy resumes from, and what it refuses."""

from __future__ import annotations

import copy
import os
import pickle
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from shutil import which
from typing import Any
from unittest.mock import Mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.graph import save_on_cpu
from torch.distributed.fsdp import CPUOffloadPolicy
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.data import TensorDataset
from trainkit.callbacks.ema import EMA
from trainkit.callbacks.gradual_unfreezing import GradualUnfreezing
from trainkit.callbacks.histograms import Histograms
from trainkit.callbacks.model_graph import ModelGraph
from trainkit.strategies.ddp import DDPStrategy
from trainkit.strategies.dp import DataParallelStrategy
from trainkit.strategies.fsdp import sharded_task
from trainkit.strategies.fsdp.sharded_task import choose_units
from trainkit.strategies.fsdp.strategy import FSDPStrategy
from trainkit.strategies.fusion.strategy import FusionStrategy
from trainkit.strategies.optimizer_shards import ELEMENTWISE
from trainkit.strategies.pipeline.strategy import PipelineStrategy
from trainkit.strategies.single import SingleStrategy
from trainkit.strategies.torch_ddp import TorchDDPStrategy

from tests.core.test_phases import Adversarial, Manual, made
from tests.core.test_phases import samples as adversarial_samples
from tests.equality import numbers
from tests.marks import in_make_zoo, on_gpu
from tests.model.test_deferred_init import LiveBytes
from tests.strategies.fusion.test_failure import LIMITS, FailingOnOne
from tests.tasks import Fitting, StopAt, adamw, distance, seeded
from tests.tasks import fit as train
from trainkit import Callback, Data, TaskModule, Trainer, UserError, deferred_init
from trainkit.distributed.failure_store import RankError
from trainkit.optim.precision import Precision
from trainkit.testing import rank_outcomes, run_ranks

NUM_SAMPLES = 29  # with batches of 8: the last one has 5, which leaves ranks with unequal shards
WORDS, WIDTH = 11, 6
TOLERANCE = 1e-9


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.widen, self.shrink = nn.Linear(WIDTH, 7), nn.Linear(7, WIDTH)
        self.norm = nn.LayerNorm(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.shrink(torch.tanh(self.widen(self.norm(x))))


class Language(TaskModule):
    """Blocks between tied layers, with a scale (a scalar), statistics in buffers, and optionally weights of samples."""

    def __init__(self, *, weighted: bool = False, twice: bool = False, frozen: bool = False, lr: float = 0.01) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            self.words = nn.Embedding(WORDS, WIDTH)
            self.blocks = nn.Sequential(Block(), Block(), Block())
            self.recurrent = nn.LSTM(WIDTH, WIDTH, batch_first=True)
            self.scale = nn.Parameter(torch.ones(()))
            self.head = nn.Linear(WIDTH, WORDS, bias=False)
            self.head.weight = self.words.weight
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))
        self.blocks[0].widen.requires_grad_(not frozen)
        self.weighted, self.twice, self.lr = weighted, twice, lr

    def forward(self, words: Tensor) -> Tensor:
        hidden = self.blocks(self.words(words))
        if self.twice:
            hidden = self.blocks(hidden)
        return self.head(self.scale * self.recurrent(hidden)[0])

    def training_step(self, batch: Any) -> Any:
        words, targets = batch
        self.seen += 1
        losses = nn.functional.cross_entropy(self(words).transpose(1, 2), targets, reduction="none")  # (samples, words)
        if not self.weighted:
            return {"loss": losses.mean(), "largest": losses.max()}
        counted = (targets > 2).to(losses.dtype)
        return {"loss": (losses * counted).sum() / counted.sum(), "weight": counted.sum()}

    def validation_step(self, batch: Any) -> Any:
        words, targets = batch
        return {"loss": nn.functional.cross_entropy(self(words).transpose(1, 2), targets)}

    def predict_step(self, batch: Any) -> Any:
        return self(batch[0])

    def configure_optimizers(self) -> Any:
        trained = [parameter for parameter in self.parameters() if parameter.requires_grad]
        return torch.optim.AdamW(trained, lr=self.lr)


def sentences() -> TensorDataset:
    words = torch.randint(WORDS, (NUM_SAMPLES, 4), generator=torch.Generator().manual_seed(1))
    return TensorDataset(words[:, :-1], words[:, 1:])


def fit(strategy: Any, task: TaskModule, run_dir: Any, *, resume: bool = False, **settings: Any) -> dict[str, float]:
    """Train for an epoch of four steps, an evaluation and a step more."""
    settings = {"max_duration": "5step", "precision": "fp64", "log_every": "1step", "run_dir": run_dir, **settings}
    data = Data(train=sentences(), validation=sentences(), batch_size=8)
    return train(strategy, task, data, resume=run_dir if resume else None, **settings).metrics


def apart(alone: Any, task: Any, folder: str, *, layout: Any = None, **settings: Any) -> float:
    """Train a task on one device and another by fsdp; return the largest difference of what they have learned."""
    fit(SingleStrategy(device="cpu"), alone, f"{folder}/single {dist.get_rank()}", **settings)
    fit(FSDPStrategy(device="cpu", **{"units": ["Block"], **(layout or {})}), task, f"{folder}/fsdp", **settings)
    task.seen.copy_(alone.seen)  # it counts micro-batches
    return distance(task, alone)


class Offloading(Callback):
    """Does on the CPU what `offload_activations` does on CUDA."""

    def on_fit_start(self, run: Any) -> None:
        run.precision.surround(partial(save_on_cpu, pin_memory=True))


CASES: dict[str, tuple[dict[str, Any], dict[str, Any], dict[str, Any]]] = {
    # arguments of the task, of the strategy, of the Trainer
    "one unit": ({}, {"units": []}, {}),
    "blocks": ({}, {"min_unit_mb": 0.0}, {}),
    "kept after forward": ({}, {"units": ["Block"], "reshard_after_forward": False}, {"max_grad_norm": 0.05}),
    "nested units": ({}, {"units": ["blocks.*", "LSTM"]}, {"max_grad_value": 0.01}),
    "accumulated": ({}, {"units": ["Block"], "accumulate": 2}, {"max_grad_norm": 0.05}),
    "weighted": ({"weighted": True}, {"units": ["Block"], "micro_batch_size": 1}, {"max_grad_norm": 0.05}),
    "one ahead": ({}, {"units": ["Block", "LSTM"], "prefetch": 1}, {"max_grad_norm": 0.05}),
    "two ahead": ({"twice": True}, {"units": ["blocks.*", "LSTM"], "prefetch": 2, "accumulate": 2}, {}),
    "several forwards": ({"twice": True}, {"units": ["Block"]}, {"on_nonfinite": "skip"}),
    "frozen": ({"frozen": True}, {"units": ["Block"], "accumulate": 2}, {"fused_optimizer": False}),
    "replicated": ({}, {"units": ["Block"], "replicate": 2, "accumulate": 2}, {"max_grad_norm": 0.05}),
    "recomputed": ({}, {"units": ["Block"]}, {"activation_checkpointing": ["blocks.*"]}),
    "on the host": ({"weighted": True}, {"units": ["Block"], "offload": "cpu"}, {"on_nonfinite": "skip"}),
    "offloaded": ({}, {"units": ["Block"]}, {"callbacks": [Offloading()], "activation_checkpointing": ["blocks.1"]}),
}


Alone = dict[str, tuple[Language, dict[str, float]]]


@pytest.fixture(scope="module")
def trained_alone(tmp_path_factory: pytest.TempPathFactory) -> Callable[[list[str]], Alone]:
    """A function that returns the tasks of cases and their losses, each trained once by one device."""
    folder, known = tmp_path_factory.mktemp("alone"), Alone()

    def train(names: list[str]) -> Alone:
        for name in [name for name in names if name not in known]:
            arguments, _, settings = CASES[name]
            task = Language(**arguments)
            losses = fit(SingleStrategy(device="cpu"), task, folder / name, **settings)
            known[name] = task, {key: losses[key] for key in ("train/loss", "validation/loss")}
        return {name: known[name] for name in names}

    return train


def differences_from_single(alone: Alone, folder: str) -> dict[str, tuple[float, float, float]]:
    """Return for each case the differences of weights and losses from `single`, and those of weights before fit."""
    found = {}
    for name, (expected, losses) in alone.items():
        arguments, layout, settings = CASES[name]
        task = Language(**arguments)
        task.seen.copy_(expected.seen)  # it counts micro-batches
        start = distance(task.double(), expected)
        parameters = list(task.parameters())
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(FSDPStrategy, "validate", lambda *_: "cpu")  # which refuses `offload` on the CPU
            on_host = Mock(wraps=partial(CPUOffloadPolicy, pin_memory=False))
            patch.setattr(sharded_task, "CPUOffloadPolicy", on_host)
            ours = fit(FSDPStrategy(device="cpu", **layout), task, f"{folder}/{name}", **settings)
        assert on_host.called == ("offload" in layout)
        assert all(one is other for one, other in zip(parameters, task.parameters(), strict=True)), "whole again"
        pickle.dumps(copy.deepcopy(task))
        task.seen.copy_(expected.seen)
        apart = max(abs(ours[key] - losses[key]) for key in losses)
        found[name] = (distance(task, expected), apart, start)
    return found


ON_TWO = ["blocks", "two ahead", "accumulated", "weighted", "several forwards"]
ON_ANY = [name for name in CASES if name != "replicated"]


@pytest.mark.parametrize(
    ("num_ranks", "names"),
    [
        (2, ON_TWO),
        pytest.param(4, ["replicated"], marks=pytest.mark.slow),
        pytest.param(1, ON_ANY, marks=pytest.mark.slow),
        pytest.param(3, [name for name in ON_ANY if name not in ON_TWO], marks=pytest.mark.slow),
        pytest.param(2, ON_ANY, marks=[pytest.mark.slow, in_make_zoo]),
        pytest.param(3, ON_ANY, marks=[pytest.mark.slow, in_make_zoo]),
    ],
    ids=["2 ranks", "4 ranks", "all on 1", "others on 3", "all on 2", "all on 3"],
)
def test_weights_and_losses_are_those_of_one_device(num_ranks, names, trained_alone, tmp_path):
    for rank in run_ranks(differences_from_single, num_ranks, trained_alone(names), str(tmp_path), timeout=150):
        assert list(rank) == names
        for name, (weights, losses, start) in rank.items():
            assert weights < TOLERANCE and losses < TOLERANCE < start, name
    for name in {"blocks", "replicated"}.intersection(names):
        assert "blocks.2" in (tmp_path / name / "partition.txt").read_text()


class Skipping(Language):
    """Evaluates without its second block."""

    def validation_step(self, batch: Any) -> Any:
        words, targets = batch
        hidden = self.recurrent(self.blocks[2](self.blocks[0](self.words(words))))[0]
        return {"loss": nn.functional.cross_entropy(self.head(hidden).transpose(1, 2), targets)}


def difference_after_evaluations(folder: str) -> float:
    alone, task = Skipping(), Skipping()
    strategies = SingleStrategy(device="cpu"), FSDPStrategy(device="cpu", units=["Block"], prefetch=1)
    for number, (strategy, trained) in enumerate(zip(strategies, (alone, task), strict=True)):
        run_dir = f"{folder}/{number or f'single {dist.get_rank()}'}"
        fit(strategy, trained, run_dir, callbacks=[EMA(decay=0.5)], evaluate_every="1step")
    task.seen.copy_(alone.seen)
    return distance(task, alone)


@pytest.mark.slow
def test_a_unit_that_was_gathered_for_an_evaluation_without_it_trains_from_its_own_weights(tmp_path):
    assert max(run_ranks(difference_after_evaluations, 2, str(tmp_path))) < TOLERANCE


def differences_in_phases(folder: str) -> list[float]:
    found = []
    for kind in (Adversarial, Manual):
        alone, task = made(kind), made(kind)
        strategies = {"single": SingleStrategy(device="cpu"), "fsdp": FSDPStrategy(device="cpu", units=["Linear"])}
        for (name, strategy), trained in zip(strategies.items(), (alone, task), strict=True):
            run_dir = f"{folder}/{name} {kind.__name__} {dist.get_rank() if name == 'single' else ''}"
            data = Data(train=adversarial_samples(), batch_size=6)
            train(strategy, trained, data, max_duration="2epoch", precision="fp64", run_dir=run_dir)
        found.append(distance(task, alone))
    return found


@pytest.mark.slow
def test_phases_have_the_weights_of_one_device(tmp_path):
    for found in run_ranks(differences_in_phases, 2, str(tmp_path)):
        assert max(found) < TOLERANCE


class ShardsOnHost(Callback):
    """Fails unless the shards and the state of the optimizer are in host memory, and the buffers on the device."""

    def on_step_end(self, run: Any) -> None:
        state = run.strategy.local_state(run.task)
        assert state["seen"].is_cuda and state["scale"].is_cuda, "nothing to shard"
        assert not state["blocks.0.widen.weight"].is_cuda
        averages = run.phase_optimizer.optimizer.state[state["blocks.0.widen.weight"]]
        assert not averages["exp_avg"].is_cuda


@on_gpu
@pytest.mark.parametrize("deferred", [False, True])
def test_shards_in_host_memory_train_and_resume_to_the_weights_of_one_device(deferred, tmp_path):
    alone, tasks = built(False, weighted=True), [built(deferred, weighted=True) for _ in range(2)]
    settings = {"max_grad_norm": 0.05, "on_nonfinite": "skip"}
    fit(SingleStrategy(device="cuda"), alone, tmp_path / "single", **settings)
    for task, stops, resume in zip(tasks, ([StopAt(3)], []), (False, True), strict=True):
        strategy = FSDPStrategy(
            devices=min(2, torch.cuda.device_count()), device="cuda", offload="cpu", units=["Block"], accumulate=2
        )
        fit(
            strategy,
            task,
            tmp_path / "fsdp",
            resume=resume,
            callbacks=[ShardsOnHost(), EMA(load_average_at_end=False), *stops],
            **settings,
        )
    tasks[1].seen.copy_(alone.seen)
    assert distance(tasks[1].cpu(), alone.cpu()) < TOLERANCE


# ---- Settings that round


class Rounded(Language):
    """Has gradients in the first step that overflow in the last rank's shard only, if it may."""

    def __init__(self, *, overflows: bool = False) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            self.recurrent = nn.GRU(WIDTH, WIDTH, batch_first=True)  # many processors have no LSTM in fp16
        self.edges = nn.Parameter(torch.zeros(4))
        self.overflows, self.calls = overflows, 0

    def training_step(self, batch: Any) -> Any:
        self.calls += 1
        loss = super().training_step(batch)["loss"]
        return loss + 1e36 * self.edges[3] if self.overflows and self.calls == 1 else loss

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.5)


ROUNDED: dict[str, tuple[dict[str, Any], dict[str, Any], dict[str, Any]]] = {
    "fp16-mixed": ({"overflows": True}, {"micro_batch_size": 1}, {"precision": "fp16-mixed", "max_grad_norm": 1.0}),
    **{name: ({}, {"reduce_dtype": name}, {}) for name in ("fp16", "fp32")},
    "bf16": ({}, {"reduce_dtype": "bf16", "accumulate": 2}, {}),
    "replicated": ({}, {"reduce_dtype": "bf16", "replicate": 2}, {}),
}


def differences_by_rounding(names: list[str], folder: str) -> dict[str, float]:
    found = {}
    for name in names:
        arguments, layout, settings = ROUNDED[name]
        alone, task = Rounded(**arguments), Rounded(**arguments)
        found[name] = apart(alone, task, f"{folder}/{name}", layout=layout, **settings)
    return found


@pytest.mark.slow
@pytest.mark.parametrize(
    ("num_ranks", "names"), [(2, ["fp16-mixed", "fp16", "fp32", "bf16"]), (4, ["replicated"])], ids=["2", "4"]
)
def test_what_rounds_trains_to_nearly_the_weights_of_one_device(num_ranks, names, tmp_path):
    for found in run_ranks(differences_by_rounding, num_ranks, names, str(tmp_path)):
        assert list(found) == names
        for name, apart in found.items():
            assert TOLERANCE < apart < 5e-3, (name, apart)


class Optimized(Language):
    """Is trained by the optimizer of a name."""

    def __init__(self, optimizer: str) -> None:
        super().__init__()
        self.optimizer = optimizer

    def configure_optimizers(self) -> Any:
        return getattr(torch.optim, self.optimizer)(self.parameters(), lr=0.1 if self.optimizer == "SGD" else 0.01)


def differences_by_optimizer(names: list[str], folder: str) -> dict[str, float]:
    found = {}
    for name in names:
        settings = {"max_duration": "2step", "evaluate_every": None}
        found[name] = apart(Optimized(name), Optimized(name), f"{folder}/{name}", **settings)
    return found


@pytest.mark.slow
def test_every_optimizer_of_elements_trains_shards_to_the_weights_of_one_device(tmp_path):
    names = [kind.__name__ for kind in ELEMENTWISE]
    for found in run_ranks(differences_by_optimizer, 2, names, str(tmp_path)):
        assert list(found) == names and max(found.values()) < TOLERANCE, found


def in_bf16(folder: str) -> None:
    for name in ("SGD", "AdamW"):
        for layout in ({}, {"reduce_dtype": "fp32"}):
            ours, theirs = Optimized(name), Optimized(name)
            for strategy, task in ((FSDPStrategy, ours), (DDPStrategy, theirs)):
                arguments = layout if strategy is FSDPStrategy else {}
                run_dir = f"{folder}/{strategy.__name__} {name} {len(layout)}"
                fit(
                    strategy(device="cpu", accumulate=2, **arguments),
                    task,
                    run_dir,
                    precision="bf16-true",
                    evaluate_every=None,
                )
            assert {parameter.dtype for parameter in ours.parameters()} == {torch.bfloat16}
            # Rounding depends on the instructions of the CPU, and AdamW turns that of a gradient near 0 into a whole
            # step of one weight. So the norm is compared: 1 to 4 % of the way here, 100 % if gradients were summed.
            sharded, whole, initial = (
                torch.cat([parameter.detach().double().flatten() for parameter in task.parameters()])
                for task in (ours, theirs, Optimized(name))
            )
            assert (sharded - whole).norm() < 0.1 * (whole - initial).norm(), (name, layout)


@pytest.mark.slow
def test_16_bits_are_trained_as_by_ddp(tmp_path):
    run_ranks(in_bf16, 2, str(tmp_path))


# ---- Compiling


def compiled_and_eager(folder: str) -> tuple[float, int]:
    """Return the difference of weights between compiled units and eager ones, and the number of graphs."""
    graphs: list[Any] = []

    def backend(graph: Any, inputs: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    eager, compiled = Language(), Language()
    fit(
        FSDPStrategy(device="cpu", units=["Block"]),
        eager,
        f"{folder}/eager",
        max_duration="1epoch",
        limit_train_batches=3,
    )
    compile_with = partial(torch.compile, backend=backend)
    with pytest.MonkeyPatch.context() as patch, torch._dynamo.config.patch(fail_on_recompile_limit_hit=True):
        patch.setattr(torch, "compile", compile_with)
        strategy = FSDPStrategy(device="cpu", units=["Block"])
        fit(strategy, compiled, f"{folder}/compiled", compile=True, max_duration="1epoch", limit_train_batches=3)
    pickle.dumps(copy.deepcopy(compiled))
    return distance(compiled, eager), len(graphs)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # what torch's compiler warns of is its own
def test_compiled_units_train_to_the_weights_of_eager_ones(tmp_path):
    for apart, graphs in run_ranks(compiled_and_eager, 2, str(tmp_path), timeout=150):
        assert apart < TOLERANCE
        assert graphs > 3, "each unit is compiled"


def layers() -> Fitting:
    blocks = seeded(
        lambda: nn.Sequential(
            nn.Embedding(WORDS, WIDTH),
            Block(),
            Block(),
            nn.Linear(WIDTH, 1),
            nn.Flatten(1),  # (8, 3), as the targets
        )
    )
    return Fitting(blocks, adamw)


def compiled_by_inductor(folder: str) -> tuple[float, float, int]:
    """Return the difference of weights from one device and from the start, and the number of compiled kernels."""
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = f"{folder}/inductor"
    start, alone, compiled = layers().double(), layers(), layers()
    settings = {"max_duration": "1step", "evaluate_every": None}
    fit(SingleStrategy(device="cpu"), alone, f"{folder}/single {dist.get_rank()}", **settings)
    fit(FSDPStrategy(device="cpu", units=["Block"]), compiled, f"{folder}/fsdp", compile=True, **settings)
    return distance(compiled, alone), distance(compiled, start), torch._inductor.metrics.generated_kernel_count


@pytest.mark.slow
@in_make_zoo
@pytest.mark.skipif(which("g++") is None and which("clang++") is None, reason="needs a C++ compiler")
@pytest.mark.filterwarnings("ignore")  # what torch's compiler warns of is its own
def test_units_that_inductor_compiles_train_to_the_weights_of_one_device(tmp_path):
    for apart, moved, kernels in run_ranks(compiled_by_inductor, 2, str(tmp_path), timeout=300):
        assert apart < TOLERANCE < moved and kernels > 0


# ---- A task that is never whole anywhere


def built(deferred: bool, *, seed: int = 0, **arguments: Any) -> Language:
    """Return a task of which one layer is another on each rank."""
    torch.manual_seed(seed + (dist.get_rank() if dist.is_initialized() else 0))
    with deferred_init() if deferred else nullcontext():
        task = Language(**arguments)
        nn.init.trunc_normal_(task.blocks[1].widen.weight, std=0.2)
        task.blocks[2].widen.weight.data.mul_(0.5)
        task.register_buffer("drawn", torch.randn(3))
    return task


def equal_bits(task: nn.Module, expected: nn.Module) -> bool:
    state, others = task.state_dict(), expected.state_dict()
    return list(state) == list(others) and all(torch.equal(state[name], others[name]) for name in state)


def deferred_and_whole(names: list[str], folder: str) -> list[bool]:
    """Train each case with a task that was built without memory, stop, resume it, and compare it with a whole one."""
    equal = []
    for name in names:
        arguments, layout, settings = CASES[name]
        tasks = [built(False, **arguments), built(True, **arguments), built(True, seed=9, **arguments)]
        parameters = list(tasks[2].parameters())
        for index, task in enumerate(tasks):
            run_dir, callbacks = f"{folder}/{name} {min(index, 1)}", [StopAt(2)] if index == 1 else []
            settings = {**settings, "max_duration": "4step", "callbacks": callbacks}
            fit(FSDPStrategy(device="cpu", **layout), task, run_dir, resume=index == 2, **settings)
        assert all(one is other for one, other in zip(parameters, tasks[2].parameters(), strict=True)), "whole again"
        assert not any(tensor.is_meta for tensor in [*tasks[2].parameters(), *tasks[2].buffers()])
        equal.append(equal_bits(tasks[2], tasks[0]))
    return equal


@pytest.mark.slow
@pytest.mark.parametrize(
    ("num_ranks", "names"),
    [
        (2, ["blocks"]),
        pytest.param(4, ["replicated"], marks=in_make_zoo),
        (3, ["nested units", "recomputed"]),
        pytest.param(3, ["frozen"], marks=in_make_zoo),
    ],
    ids=["2 ranks", "4 ranks", "3 ranks", "frozen on 3"],
)
def test_a_task_built_without_memory_trains_to_the_same_bits(num_ranks, names, tmp_path):
    for equal in run_ranks(deferred_and_whole, num_ranks, names, str(tmp_path), timeout=150):
        assert equal == [True] * len(names)


def refused_on_ranks_that_differ(folder: str) -> str:
    with pytest.raises(RuntimeError, match="do not have the same model") as raised:
        fit(FSDPStrategy(device="cpu"), built(dist.get_rank() == 0), folder)
    return str(raised.value)


def test_a_task_without_memory_on_some_ranks_only_is_refused(tmp_path):
    for message in run_ranks(refused_on_ranks_that_differ, 2, str(tmp_path)):
        assert "on meta on rank 0, but" in message


STRATEGIES = {
    "single": lambda: SingleStrategy(device="cpu"),
    "dp": lambda: DataParallelStrategy(devices=["cpu", "cpu"]),
    "ddp": lambda: DDPStrategy(devices=2, device="cpu"),
    "torch_ddp": lambda: TorchDDPStrategy(devices=2, device="cpu"),
    "fusion": lambda: FusionStrategy(devices=2, device="cpu"),
    "fsdp": lambda: FSDPStrategy(devices=2, device="cpu", units=["Block"]),
    "pipeline": lambda: PipelineStrategy(stages=2, device="cpu"),
}


@pytest.mark.parametrize(
    "name", [name if name == "fsdp" else pytest.param(name, marks=pytest.mark.slow) for name in STRATEGIES]
)
def test_a_task_built_without_memory_trains_under_every_strategy(name, tmp_path):
    trained = []
    for deferred in (False, True):
        trained.append(built(deferred))
        fit(STRATEGIES[name](), trained[-1], tmp_path / str(deferred), max_duration="3step")
    assert equal_bits(*trained) and trained[1].head.weight is trained[1].words.weight


def most_bytes_while_sharded() -> tuple[int, int]:
    """Return the bytes that preparing a task without memory had alive at once, and those of the whole task."""
    with deferred_init():
        task = TaskModule()
        task.layers = nn.Sequential(*(nn.Linear(256, 256) for _ in range(16)))
        for layer in task.layers:
            nn.init.normal_(layer.weight)
    strategy = FSDPStrategy(device="cpu", units=["Linear"])
    strategy.setup(Precision())
    with LiveBytes() as live:
        strategy.prepare(task)
    return live.most, sum(parameter.nbytes for parameter in task.parameters())


def test_a_rank_holds_its_shards_and_one_parameter_at_a_time():
    for most, whole in run_ranks(most_bytes_while_sharded, 2):
        assert most < whole / 2 + 3 * whole / 16  # of 16 layers; the recording is small


class Operations(TorchDispatchMode):
    """Collects the namespaces of the operations that run."""

    def __init__(self) -> None:
        super().__init__()
        self.namespaces: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.namespaces.add(func.namespace)
        return func(*args, **(kwargs or {}))


def namespaces_of_a_run(folder: str) -> set[str]:
    with Operations() as operations:
        fit(FSDPStrategy(device="cpu", units=["Block"]), Language(), Path(folder), max_duration="1step")
    return operations.namespaces


def test_no_collective_has_a_name_that_gloo_keeps_in_the_heap(tmp_path):
    # Functional all-gathers, as of full_tensor, are ALLGATHER_COALESCED to gloo: two threads free that string at once.
    for namespaces in run_ranks(namespaces_of_a_run, 2, str(tmp_path)):
        assert "c10d" in namespaces and "_c10d_functional" not in namespaces


# ---- State


def trained_on(kind: str, folder: Path, resume: bool, stop: int | None) -> dict[str, Tensor]:
    """Train, or go on from the folder's checkpoint, until after a step or the end; return the weights."""
    task = Language()
    made = {
        "fsdp": lambda: FSDPStrategy(device="cpu", units=["Block"]),
        "fsdp in groups": lambda: FSDPStrategy(device="cpu", units=["Block"], replicate=2),
        "ddp": lambda: DDPStrategy(device="cpu"),
        "single": lambda: SingleStrategy(device="cpu"),
    }
    ema = EMA(decay=0.5)
    callbacks = [ema] if stop is None else [ema, StopAt(stop)]
    fit(made[kind](), task, folder, resume=resume, callbacks=callbacks)
    return task.state_dict()


@pytest.mark.slow
def test_a_run_goes_on_under_other_strategies_and_numbers_of_ranks(tmp_path):
    expected = trained_on("single", tmp_path / "whole", False, None)
    chain = [("fsdp", 3, 1), ("ddp", 2, 2), ("fsdp in groups", 4, 3), ("single", 1, 4), ("fsdp", 2, None)]  # of 5 steps
    for kind, num_ranks, stop in chain:
        weights, *_ = run_ranks(trained_on, num_ranks, kind, tmp_path / "chain", stop != 1, stop)
    assert list(weights) == list(expected)
    for name, tensor in weights.items():
        if name != "seen":
            assert (tensor - expected[name]).abs().max() < TOLERANCE, name


class SaveShards(Callback):
    def on_step_end(self, run: Any) -> None:
        if run.state.step == 3:
            run.checkpointer.save(reason="test", sharded=True)
            run.request_stop("test")


def saved_by_shards(folder: Path, replicate: int) -> None:
    strategy = FSDPStrategy(device="cpu", units=["Block"], replicate=replicate)
    fit(strategy, Language(), folder, callbacks=[SaveShards()])


@pytest.mark.slow
@pytest.mark.parametrize(("num_ranks", "replicate"), [(3, 1), (4, 2)])
def test_sharded_checkpoints_are_resumed_by_one_device(num_ranks, replicate, tmp_path):
    alone, resumed = Language(), Language()
    fit(SingleStrategy(device="cpu"), alone, tmp_path / "single")
    run_ranks(saved_by_shards, num_ranks, tmp_path / "shards", replicate)
    assert len(list((tmp_path / "shards" / "checkpoints").glob("*.shards/*"))) >= 3
    fit(SingleStrategy(device="cpu"), resumed, tmp_path / "shards", resume=True)
    resumed.seen.copy_(alone.seen)
    assert distance(resumed, alone) < TOLERANCE


# ---- Evaluation and ranks without samples


def evaluated(folder: str) -> tuple[dict[str, float], Tensor, list[float]]:
    task = Language()
    trainer = Trainer(FSDPStrategy(device="cpu", min_unit_mb=0.0), callbacks=[], loggers=[], precision="fp64")
    metrics = trainer.validate(task, Data(validation=sentences(), batch_size=13))
    predictions = trainer.predict(task, Data(predict=sentences(), batch_size=13))
    few = TensorDataset(*sentences()[:1])
    one = trainer.predict(task, Data(predict=few, batch_size=13))  # the other ranks have no batch at all
    if dist.get_rank() == 0:
        torch.testing.assert_close(one, task.predict_step(few.tensors).detach(), rtol=1e-12, atol=1e-12)
    return metrics, predictions, [task.blocks[0].widen.weight.sum().item()]


@pytest.mark.slow
def test_evaluation_counts_each_sample_once_and_keeps_the_order(tmp_path):
    task = Language().double()
    expected = Trainer(SingleStrategy(device="cpu"), callbacks=[], loggers=[], precision="fp64").validate(
        task, Data(validation=sentences(), batch_size=13)
    )
    ranks = run_ranks(evaluated, 3, str(tmp_path))
    for metrics, _, _ in ranks:
        assert metrics == pytest.approx(expected, rel=1e-12)
    torch.testing.assert_close(ranks[0][1], task(sentences().tensors[0]).detach(), rtol=1e-12, atol=1e-12)


class Counting(Language):
    """Counts its micro-batches in an attribute, and takes the tensors out of them."""

    calls = 0

    def training_step(self, batch: Any) -> Any:
        self.calls += 1
        words, targets = batch.pop(0), batch.pop(0)
        return super().training_step((words, targets))


def micro_batches_counted(folder: str) -> list[int]:
    found = []
    for strategy in (FSDPStrategy(device="cpu", micro_batch_size=1), DDPStrategy(device="cpu", micro_batch_size=1)):
        task = Counting()
        fit(strategy, task, f"{folder}/{type(strategy).__name__}")
        found.append(task.calls)
    return found


@pytest.mark.slow
def test_a_repeated_batch_is_not_counted_by_the_task(tmp_path):
    ranks = run_ranks(micro_batches_counted, 2, str(tmp_path))
    assert all(fsdp == ddp for fsdp, ddp in ranks)
    assert ranks[0] != ranks[1]


class Collecting(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, states: list[Tensor]) -> Tensor:
        states.append(x)
        return self.layer(x)


class Collected(TaskModule):
    """Its units append to a list, which `fully_shard` gives them a copy of."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, WIDTH)
        self.blocks = nn.ModuleList([Collecting(), Collecting()])

    def training_step(self, batch: Any) -> Any:
        x, states = self.words(batch[0]), list[Tensor]()
        for block in self.blocks:
            x = block(x, states)
        return x.square().mean() + sum(state.square().mean() for state in states)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def collected(folder: str) -> str:
    task, strategy = Collected(), FSDPStrategy(device="cpu", min_unit_mb=0)
    try:
        train(strategy, task, Data(train=sentences(), batch_size=8), max_duration="2step", run_dir=folder)
    except UserError as error:
        return str(error)
    return ""


def test_a_unit_that_fills_a_list_is_refused(tmp_path):
    for message in run_ranks(collected, 2, str(tmp_path)):
        assert "blocks.0 changes a list or dictionary that it is called with" in message


class Unfrozen(Language):
    def configure_callbacks(self) -> list[Callback]:
        return [GradualUnfreezing(unfreeze_at={"blocks.*": "3step"})]


@pytest.mark.slow
def test_frozen_blocks_are_unfrozen_as_on_one_device(tmp_path):
    for apart in run_ranks(with_unfreezing, 2, str(tmp_path)):
        assert apart < TOLERANCE


def with_unfreezing(folder: str) -> float:
    return apart(Unfrozen(), Unfrozen(), folder)


# ---- Failures


def failing(fault: str, folder: Path) -> str:
    """Train until rank 1 fails in a step; return this rank's error."""
    task = FailingOnOne()
    task.fault, task.until = fault, folder / "noticed"
    strategy = FSDPStrategy(device="cpu", units=["Linear"], timeout_seconds=600.0)
    try:
        train(strategy, task, Data(train=numbers(24), batch_size=6), max_duration="6step", run_dir=folder)
    except RankError as error:
        return str(error)
    return "no error"


@pytest.mark.parametrize(
    ("fault", "failure", "told"),
    [
        ("raise", "ZeroDivisionError: rank 1 cannot go on", "rank 1 failed in step 2: ZeroDivisionError"),
        ("die", "the process was killed by SIGKILL", "a rank is gone"),
    ],
)
def test_a_rank_that_fails_in_a_step_ends_the_others_with_its_reason(fault, failure, told, tmp_path):
    first, second = rank_outcomes(failing, 2, fault, tmp_path, **LIMITS)
    assert failure in second.failure
    assert first.value.startswith("stopped while waiting in forward and backward of step 2, because ")
    assert told in first.value


# ---- What is refused


class Direct(Language):
    def training_step(self, batch: Any) -> Any:
        return super().training_step(batch)["loss"] + self.blocks[1].widen.weight.square().sum()


class InPlace(Language):
    def training_step(self, batch: Any) -> Any:
        with torch.no_grad():
            self.words.weight.clamp_(-1, 1)
        return super().training_step(batch)


class AsArray(Language):
    def training_step(self, batch: Any) -> Any:
        return super().training_step(batch)["loss"] * self.words.weight.detach().numpy().max()


class Viewed(Block):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).view(x.shape)


class AddedInPlace(Language):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.Sequential(Viewed(), Viewed(), Viewed())

    def forward(self, words: Tensor) -> Tensor:
        hidden = self.blocks(self.words(words))
        hidden += 1.0
        return self.head(hidden)


class Uneven(Language):
    def forward(self, words: Tensor) -> Tensor:
        first, second, third = self.blocks
        hidden = third((first if dist.get_rank() else second)(self.words(words)))
        return self.head(self.scale * self.recurrent(hidden)[0])


class Muddled(Language):
    def configure_optimizers(self) -> Any:
        return torch.optim.Adafactor(self.parameters())


def refusals(folder: str) -> dict[str, str]:
    cases: dict[str, tuple[TaskModule, dict[str, Any], dict[str, Any]]] = {
        "direct": (Direct(), {"units": ["Block"]}, {}),
        "in place": (InPlace(), {"units": ["Block"]}, {}),
        "array": (AsArray(), {"units": ["Block"]}, {}),
        "added": (AddedInPlace(), {"units": ["Viewed"]}, {}),
        "uneven": (Uneven(), {"units": ["Block"]}, {}),
        "optimizer": (Muddled(), {}, {}),
        "groups": (Language(), {"reshard_after_forward": 2}, {}),
        "replicas": (Language(), {"replicate": 2}, {}),
        "histograms": (Language(), {}, {"callbacks": [Histograms()]}),
        "graph": (Language(), {}, {"callbacks": [ModelGraph()]}),
    }
    messages = {}
    for name, (task, arguments, settings) in cases.items():
        with pytest.raises(UserError) as raised:
            fit(FSDPStrategy(device="cpu", **arguments), task, f"{folder}/{name}", evaluate_every=None, **settings)
        messages[name] = str(raised.value)
    return messages


def test_what_would_train_other_weights_is_refused_by_name(tmp_path):
    for messages in run_ranks(refusals, 2, str(tmp_path)):
        assert "blocks.1.widen.weight is used as a whole, where each rank has a shard" in messages["direct"]
        assert "words.weight was changed in place" in messages["in place"]
        assert "AsArray.training_step keeps the memory of a gathered parameter" in messages["array"]
        assert "an output that is changed in place" in messages["added"]
        assert "is at the forward of blocks.0" in messages["uneven"]
        assert "Adafactor may need full parameters" in messages["optimizer"]
        assert "reshard_after_forward=2 must divide the 2 ranks" in messages["groups"]
        assert (
            "replicate=2 must divide the 2 ranks into groups of at least two; set strategy.replicate=1"
            in messages["replicas"]
        )
        assert "histograms needs whole parameters" in messages["histograms"]
        assert "model_graph needs whole parameters" in messages["graph"]


@pytest.mark.parametrize(
    ("arguments", "precision", "message"),
    [
        (
            {"prefetch": 2, "units": []},
            "fp32",
            r"prefetch=2 gathers units ahead, and Language is one unit with .*=\[\]",
        ),
        ({"reduce_dtype": "bf16"}, "bf16-true", "reduce_dtype=bf16 does nothing"),
        ({"micro_batch_size": "auto"}, "fp32", "auto measures the memory of CUDA devices .* and this run is on cpu"),
        (
            {"offload": "cpu"},
            "fp32",
            "offload=cpu moves shards from CUDA devices to host memory, and this run is on cpu",
        ),
        ({"reduce_dtype": "fp32"}, "bf16-mixed", "reduce_dtype=fp32 does nothing: the gradients of Language are fp32"),
    ],
)
def test_what_cannot_train_the_task_is_refused_before_ranks_start(arguments, precision, message):
    trainer = Trainer(FSDPStrategy(device="cpu", **arguments), precision=precision, callbacks=[], loggers=[])
    with pytest.raises(UserError, match=message):
        trainer.check(Language(), Data(train=sentences(), batch_size=8), resume=None)


def test_shards_in_host_memory_are_not_trained_with_a_scaler():
    with pytest.raises(UserError, match="offload=cpu does not support fp16-mixed"):
        FSDPStrategy(offload="cpu").validate(Language(), Precision("fp16-mixed"))


# ---- Units


def names_of(task: nn.Module, units: Any, *, min_bytes: float = 0.0) -> list[str]:
    return [unit.name for unit in choose_units(task, units, min_bytes=min_bytes)]


def test_repeated_blocks_are_units_and_tied_layers_are_not():
    task = Language()
    assert names_of(task, "auto") == ["blocks.0", "blocks.1", "blocks.2", "(task)"]
    assert names_of(task, "auto", min_bytes=1e6) == ["(task)"]
    assert names_of(task, ["blocks.1", "LSTM"]) == ["blocks.1", "recurrent", "(task)"]


def test_small_blocks_make_a_stage_the_unit():
    stages = nn.Sequential(*(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)) for _ in range(2)))
    assert names_of(stages, "auto", min_bytes=100.0) == ["0", "1", "(task)"]
    assert names_of(stages, "auto", min_bytes=1.0) == ["0.0", "0.1", "1.0", "1.1", "(task)"]


def test_a_block_with_a_parameter_of_another_is_no_unit():
    blocks = nn.Sequential(Block(), Block(), Block())
    blocks[1].widen = blocks[0].widen
    assert names_of(blocks, "auto", min_bytes=200.0)[-2:] == ["2", "(task)"]
    assert names_of(blocks, "auto") == ["0.widen", "0.shrink", "1.shrink", "2", "(task)"], "a shared module is one"
    with pytest.raises(UserError, match=r"0 and 1\.widen share a parameter"):
        names_of(blocks, ["0"])


def test_a_wrong_unit_is_named_with_the_nearest():
    with pytest.raises(UserError, match=r"'block' matches no module with parameters\. Did you mean 'blocks'\?"):
        names_of(Language(), ["block"])
    listed = nn.Module()
    listed.layers = nn.ModuleList([nn.Linear(2, 2)])
    with pytest.raises(UserError, match="layers is a ModuleList, which has no forward"):
        names_of(listed, ["layers"])
