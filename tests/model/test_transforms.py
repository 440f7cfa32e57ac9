"""Changes of the Trainer's settings to a task's modules and its optimizer's groups."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.optim.lr_scheduler import LambdaLR, OneCycleLR, SequentialLR
from trainkit.strategies.dp.strategy import DataParallelStrategy
from trainkit.strategies.pipeline.strategy import PipelineStrategy
from trainkit.strategies.single import SingleStrategy

from tests.marks import on_gpu
from tests.tasks import Recorder, Regression, assert_same_bits, regression_data, weights
from trainkit import Callback, Data, UserError, registry
from trainkit.loops import worker
from trainkit.model.offload import offloaded
from trainkit.model.transforms import ModelTransforms, matches
from trainkit.optim.optimizer import split_weight_decay_groups
from trainkit.testing import assert_strategies_equal


class Block(nn.Module):
    """A residual layer with dropout that counts how often it runs."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(4)
        self.linear = nn.Linear(4, 4)
        self.dropout = nn.Dropout(0.3)
        self.calls = 0

    def forward(self, inputs: Tensor) -> Tensor:
        self.calls += 1
        return inputs + self.dropout(self.linear(self.norm(inputs)))


class Blocks(Regression):
    def __init__(self, optimizer: Any = None) -> None:
        super().__init__(optimizer)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            self.blocks = nn.ModuleList([Block(), Block()])

    def forward(self, inputs: Tensor) -> Tensor:
        for block in self.blocks:
            inputs = block(inputs)
        return super().forward(inputs)


def adamw(task: Any) -> Any:
    return torch.optim.AdamW([p for p in task.parameters() if p.requires_grad], lr=0.05, weight_decay=0.1)


def data() -> Data:
    return Data(train=regression_data(32), batch_size=8)


def test_frozen_parameters_stay_bit_equal_and_can_be_trained_afterwards(make_trainer: Any) -> None:
    task = Blocks(adamw)
    before = weights(task)

    make_trainer(freeze=["blocks.0", "*.bias"]).fit(task, data())

    moved = {name for name, tensor in weights(task).items() if not torch.equal(tensor, before[name])}
    assert moved == {"blocks.1.norm.weight", "blocks.1.linear.weight", "network.0.weight"}
    assert all(parameter.requires_grad for parameter in task.parameters())


@pytest.mark.parametrize("strategy", [None, "dp"])
def test_activations_are_computed_twice_and_weights_are_the_same_to_the_bit(make_trainer: Any, strategy: Any) -> None:
    def made() -> Any:
        return DataParallelStrategy(devices=["cpu", "cpu"]) if strategy else None

    plain, checkpointed = Blocks(), Blocks()
    kinds = []

    class Looks(Callback):
        def on_step_end(self, run: Any) -> None:
            kinds.append([type(block).__name__ for block in run.task.blocks])

    make_trainer(made()).fit(plain, data())
    make_trainer(made(), activation_checkpointing=["blocks.*"], callbacks=[Looks()]).fit(checkpointed, data())

    assert_same_bits(checkpointed, plain)
    assert kinds[0] == ["Block", "Block"]
    assert all(type(block) is Block for block in checkpointed.blocks)
    if not strategy:
        assert [block.calls for block in plain.blocks] == [4, 4]
        assert [block.calls for block in checkpointed.blocks] == [8, 8]


class OnCuda(SingleStrategy):
    """Says that it is on CUDA before a run, and trains on the CPU."""

    def validate(self, task: nn.Module, precision: Any) -> str:
        return "cuda"


@on_gpu
@pytest.mark.parametrize("checkpointing", [[], ["blocks.*"]])
def test_offloaded_activations_train_to_the_same_weights(
    make_trainer: Any, monkeypatch: Any, checkpointing: Any
) -> None:
    on_host: list[Tensor] = []

    def counted(copies: torch.Stream) -> saved_tensors_hooks:
        hooks = offloaded(copies)
        pack = hooks.pack_hook

        def pack_and_count(tensor: Tensor) -> Any:
            packed = pack(tensor)
            if packed is not tensor:
                assert tensor.data_ptr() not in {weight.data_ptr() for weight in task.parameters()}
                on_host.append(tensor)
            return packed

        return saved_tensors_hooks(pack_and_count, hooks.unpack_hook)

    monkeypatch.setattr(worker, "offloaded", counted)
    plain, task, settings = Blocks(), Blocks(), {"activation_checkpointing": checkpointing, "precision": "fp64"}
    make_trainer(SingleStrategy(device="cuda"), **settings).fit(plain, data())
    assert not on_host
    make_trainer(SingleStrategy(device="cuda"), offload_activations=True, **settings).fit(task, data())

    # What comes back is contiguous, for which a processor may have another kernel.
    torch.testing.assert_close(weights(task), weights(plain), rtol=0, atol=1e-14)
    assert len(on_host) > 2 * 4  # the inputs of both blocks in each of 4 steps, and others
    on_host.clear()
    make_trainer(SingleStrategy(device="cuda"), **settings).fit(task, data())
    assert not on_host


def test_offloading_is_refused_by_name_where_it_does_nothing(make_trainer: Any, monkeypatch: Any) -> None:
    for strategy in (None, DataParallelStrategy(devices=["cpu", "cpu"]), PipelineStrategy(stages=2, device="cpu")):
        with pytest.raises(UserError, match="works on CUDA devices only, and this run is on cpu"):
            make_trainer(strategy, offload_activations=True).fit(Blocks(), data())
    monkeypatch.setattr(PipelineStrategy, "validate", OnCuda.validate)
    pipeline = PipelineStrategy(stages=2, device="cpu", backend="gloo")
    with pytest.raises(UserError, match="does not work with PipelineStrategy, which keeps activations by itself"):
        make_trainer(pipeline, offload_activations=True).fit(Blocks(), data())


@on_gpu
def test_offloading_saves_memory_on_cuda_and_changes_no_bit(make_trainer: Any) -> None:
    def trained(**settings: Any) -> tuple[nn.Module, int]:
        task = Blocks()
        task.blocks.extend(Block() for _ in range(20))
        torch.cuda.reset_peak_memory_stats()
        many = Data(train=regression_data(2**18), batch_size=2**17)
        make_trainer(SingleStrategy(device="cuda"), **settings).fit(task, many)
        return task, torch.cuda.max_memory_allocated()

    torch.manual_seed(0)
    plain, most = trained()
    torch.manual_seed(0)
    task, least = trained(offload_activations=True)
    assert_same_bits(task, plain)
    assert least < most / 2


def test_parameters_without_decay_are_a_group_with_the_same_learning_rate(make_trainer: Any) -> None:
    def build(task: Any) -> Any:
        optimizer = adamw(task)
        return optimizer, LambdaLR(optimizer, lambda step: 1.0 / (1 + step))

    recorder = Recorder()
    callbacks = ["learning_rate_monitor", recorder]
    make_trainer(no_weight_decay=["bias", "norm"], callbacks=callbacks, log_every="4step").fit(Blocks(build), data())

    assert recorder.logged[0]["train/learning_rate"] == pytest.approx(0.05 / 5)
    (phase_optimizer,) = recorder.run.phase_optimizers
    decayed, exempt = phase_optimizer.optimizer.param_groups
    names = {id(parameter): name for name, parameter in recorder.run.task.named_parameters()}
    assert (decayed["weight_decay"], exempt["weight_decay"]) == (0.1, 0.0)
    assert [names[id(p)] for p in decayed["params"]] == [
        "network.0.weight",
        "blocks.0.linear.weight",
        "blocks.1.linear.weight",
    ]
    assert all("norm" in names[id(p)] or names[id(p)].endswith("bias") for p in exempt["params"])
    assert decayed["lr"] == exempt["lr"] == pytest.approx(0.05 / 5)


def test_the_weights_are_those_of_groups_made_by_hand(make_trainer: Any) -> None:
    def by_hand(task: Any) -> Any:
        bias = [p for name, p in task.named_parameters() if name.endswith("bias")]
        others = [p for name, p in task.named_parameters() if not name.endswith("bias")]
        groups = [{"params": others}, {"params": bias, "weight_decay": 0.0}]
        return torch.optim.AdamW(groups, lr=0.05, weight_decay=0.1)

    by_rule, expected = Blocks(adamw), Blocks(by_hand)
    make_trainer(no_weight_decay=["bias"]).fit(by_rule, data())
    make_trainer().fit(expected, data())

    assert_same_bits(by_rule, expected)


@pytest.mark.parametrize("kind", ["one cycle", "sequential"])
def test_schedules_made_before_step_all_groups(kind: str) -> None:
    from trainkit.optim.lr_schedule import LRSchedule

    def rates(rules: list[str]) -> list[float]:
        task = Blocks()
        optimizer = adamw(task)
        scheduler: Any = OneCycleLR(optimizer, max_lr=1.0, total_steps=20)
        if kind == "sequential":
            optimizer = adamw(task)
            parts = [LambdaLR(optimizer, lambda step: step / 5), LambdaLR(optimizer, lambda step: 0.9**step)]
            scheduler = SequentialLR(optimizer, parts, milestones=[5])
        split_weight_decay_groups(optimizer, [LRSchedule(scheduler)], task, rules)
        seen = []
        for _ in range(10):
            optimizer.step()
            scheduler.step()
            groups = {group["lr"] for group in optimizer.param_groups}
            assert len(groups) == 1
            seen += groups
        return seen

    assert rates(["bias", "norm"]) == rates([])


def test_convolutions_are_laid_out_by_pixels(make_trainer: Any) -> None:
    class Picture(Regression):
        def __init__(self) -> None:
            super().__init__()
            self.conv = nn.Conv2d(2, 3, 2)

        def forward(self, inputs: Tensor) -> Tensor:
            return super().forward(inputs) + self.conv(inputs.repeat(1, 2).view(-1, 2, 2, 2)).mean()

    task = Picture()
    make_trainer(channels_last=True).fit(task, data())

    assert task.conv.weight.is_contiguous(memory_format=torch.channels_last)
    assert not task.conv.weight.is_contiguous()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"freeze": ["block.0"]}, r"freeze: 'block\.0' matches no parameter"),
        ({"freeze": ["*"]}, r"freeze=\['\*'\] leaves no parameter to train"),
        ({"freeze": "blocks.0"}, r"freeze='blocks\.0' is not a list of patterns; write freeze=\['blocks\.0'\]"),
        (
            {"activation_checkpointing": ["layers.*"]},
            r"activation_checkpointing: 'layers\.\*' matches no module.*There are: ",
        ),
        ({"no_weight_decay": ["embeding.*"]}, r"no_weight_decay: 'embeding\.\*' matches none of the optimizer's"),
    ],
)
def test_mistakes_are_rejected_with_the_valid_names(make_trainer: Any, settings: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        make_trainer(**settings).fit(Blocks(adamw), data())


def test_a_pattern_matches_names_of_parameters_and_of_modules_that_contain_them() -> None:
    assert matches("encoder.layers.0.weight", "encoder")
    assert matches("encoder.layers.0.weight", "encoder.layers.?")
    assert matches("encoder.layers.0.weight", "*.weight")
    assert not matches("encoder.layers.0.weight", "layers")
    assert not matches("encoder2.weight", "encoder")


def test_batch_norms_are_synchronised_on_several_cuda_devices_only() -> None:
    def converted(world_size: int, device: str) -> type[nn.Module]:
        task = Regression()
        task.norm = nn.BatchNorm1d(4)
        transforms = ModelTransforms(sync_batch_norm=True)
        with transforms.applied(task, num_processes=world_size, device=torch.device(device)):
            return type(task.norm)

    assert converted(2, "cuda") is nn.SyncBatchNorm
    assert converted(1, "cuda") is nn.BatchNorm1d
    assert converted(1, "cpu") is nn.BatchNorm1d
    with pytest.raises(UserError, match="sync_batch_norm=true works on CUDA devices only"):
        converted(2, "cpu")


class Normed(Regression):
    """Two blocks with batch norms before the layer of `Regression`."""

    def __init__(self) -> None:
        super().__init__(adamw)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            self.body = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Tanh())
            self.neck = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4, affine=False))

    def forward(self, inputs: Tensor) -> Tensor:
        return super().forward(self.neck(self.body(inputs)))


STATISTICS = {"running_mean", "running_var", "num_batches_tracked"}


def moved_statistics(task: Normed, before: dict[str, Tensor]) -> set[str]:
    """Return the names of the batch norms whose statistics changed."""
    names = [name for name in before if name.rpartition(".")[2] in STATISTICS]
    after = task.state_dict()
    return {name.rpartition(".")[0] for name in names if not torch.equal(after[name], before[name])}


@pytest.mark.parametrize(
    ("freeze", "moved"),
    [
        ([], ["body.1", "neck.1"]),
        (["body"], ["neck.1"]),
        (["body.*", "neck"], []),
        (["body.1.weight", "body.1.bias"], ["neck.1"]),
        (["*.bias"], ["body.1", "neck.1"]),
    ],
    ids=str,
)
def test_frozen_batch_norms_keep_their_statistics_also_after_evaluations(
    make_trainer: Any, freeze: list[str], moved: list[str]
) -> None:
    task = Normed()
    before = weights(task)
    validated = Data(train=regression_data(32), validation=regression_data(8), batch_size=8)

    make_trainer(freeze=freeze, evaluate_every="1step", num_sanity_batches=1).fit(task, validated)

    assert sorted(moved_statistics(task, before)) == moved
    assert all(module.training for module in task.modules())
    assert type(task.body[1]) is nn.BatchNorm1d


def test_frozen_batch_norms_normalize_with_their_statistics(make_trainer: Any) -> None:
    class Constants(Normed):
        """Has the layer that a frozen batch norm with its first statistics is."""

        def __init__(self) -> None:
            super().__init__()
            self.body[1].register_forward_hook(lambda norm, inputs, output: inputs[0] / (1 + norm.eps) ** 0.5)

    frozen, expected = Normed(), Constants()
    make_trainer(freeze=["body.1"]).fit(frozen, data())
    make_trainer(freeze=["body.1"]).fit(expected, data())

    torch.testing.assert_close(frozen.network[0].weight, expected.network[0].weight)
    assert not torch.equal(frozen.network[0].weight, Normed().network[0].weight)


@pytest.mark.parametrize("name", ["ddp", "dp", "pipeline"])
def test_frozen_batch_norms_keep_their_statistics_under_other_strategies(make_trainer: Any, name: str) -> None:
    settings = {"pipeline": {"stages": 2, "accumulate": 2}, "dp": {"devices": ["cpu", "cpu"]}}.get(name, {"devices": 2})
    strategy = registry.make("strategy", name, settings if name == "dp" else {"device": "cpu", **settings})
    task, alone = Normed(), Normed()
    before = weights(task)

    make_trainer(strategy, freeze=["body", "neck"]).fit(task, data())
    make_trainer(freeze=["body", "neck"]).fit(alone, data())

    assert moved_statistics(task, before) == set()
    torch.testing.assert_close(task.network[0].weight, alone.network[0].weight)


class WithoutDropout(Blocks):
    def __init__(self) -> None:
        super().__init__(adamw)
        for block in self.blocks:
            block.dropout.p = 0.0


@pytest.mark.slow
def test_transforms_are_the_same_in_a_pipeline() -> None:
    settings = {
        "activation_checkpointing": ["blocks.*"],
        "freeze": ["blocks.0.linear"],
        "no_weight_decay": ["bias", "norm"],
        "max_grad_norm": 0.5,
    }

    assert_strategies_equal(WithoutDropout, data, ["pipeline"], steps=4, trainer=settings)
