from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from trainkit.callbacks.checkpoint import Checkpoint
from trainkit.callbacks.model_graph import ModelGraph
from trainkit.callbacks.model_summary import ModelSummary, summary

from tests.tasks import MemoryLogger, Regression, regression_data
from trainkit import Data, Phase, TaskModule
from trainkit.console import size
from trainkit.model.flops import cost_of_step
from trainkit.trainer import FitResult

Fit = Callable[..., FitResult]


class Model(nn.Module):
    """Two layers that share a weight, one frozen, one with buffers, and a direct parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(10, 4)
        self.head = nn.Linear(4, 10, bias=False)
        self.head.weight = self.embedding.weight
        self.frozen = nn.Linear(4, 4).requires_grad_(False)
        self.norm = nn.BatchNorm1d(4)
        self.scale = nn.Parameter(torch.ones(1))


def test_every_direct_sub_module_has_a_row_and_shared_weights_count_once_in_the_total() -> None:
    assert summary(Model(), max_rows=20).rows == [
        ["embedding", "Embedding", "40", "40", "0", "160 B"],
        ["head", "Linear", "40", "40", "0", "160 B"],
        ["frozen", "Linear", "20", "0", "0", "80 B"],
        ["norm", "BatchNorm1d", "8", "8", "9", "72 B"],
        ["(its own)", "", "1", "1", "0", "4 B"],
        ["total", "", "69", "49", "9", "316 B"],
    ]


def test_a_sparse_buffer_counts_with_its_indices_and_values() -> None:
    model = nn.Linear(3, 1, bias=False)
    model.register_buffer("adjacency", torch.eye(3).to_sparse())
    assert summary(model, max_rows=20).rows[-1][-1] == size(12 + 2 * 3 * 8 + 3 * 4)


def test_a_long_list_is_truncated_and_the_total_is_of_all() -> None:
    rows = summary(nn.Sequential(*[nn.Linear(1, 1, bias=False) for _ in range(30)]), max_rows=2).rows

    assert [row[0] for row in rows] == ["0", "1", "28 more", "total"]
    assert rows[-1][2] == "30"


def test_sizes_are_in_binary_units() -> None:
    assert summary(nn.Linear(1024, 1024, bias=False), max_rows=20).rows[-1][-1] == "4.0 MiB"


def test_the_header_shows_task_strategy_and_batches(
    fit: Fit, scripted: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    fit(scripted(), ModelSummary())

    printed = capsys.readouterr().out
    assert "strategy     single on cpu" in printed
    assert "precision    fp32" in printed
    assert "batches      global batch 4 = 1 rank x 1 micro-batch x 4 samples" in printed
    assert "steps        20" in printed
    assert f"run folder   {tmp_path / 'run'}" in printed
    assert "resumed" not in printed


def test_the_header_of_a_resumed_run_shows_its_checkpoint(
    fit: Fit, scripted: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    fit(scripted(), Checkpoint(), max_duration="4step")

    fit(scripted(), ModelSummary(), resume=tmp_path / "run")

    assert f"resumed      from {tmp_path / 'run'} at step 4" in capsys.readouterr().out


def test_costs_are_those_of_one_forward_by_module() -> None:
    """A linear layer of m inputs and n outputs costs 2 m n a sample, and keeps its input; tanh keeps its output."""
    task, batch = Regression(hidden=3), [*regression_data(8).tensors]

    cost = cost_of_step(task, batch)
    rows = summary(task, max_rows=20, depth=2, cost=cost).rows

    assert cost.flops["network.0"] == 2 * 4 * 3 * 8
    assert cost.flops[""] == cost.flops["network"] == 2 * (4 * 3 + 3 * 1) * 8
    assert cost.saved_bytes["network.0"] == 4 * 8 * 4
    assert cost.saved_bytes["network.1"] == 4 * 8 * 3
    assert rows[1] == ["network.0", "Linear", "15", "15", "0", "60 B", "192", "128 B"]
    assert [row[0] for row in rows] == ["network", *(f"network.{index}" for index in range(4)), "total"]
    assert task.training


def test_costs_are_shown_if_enabled_and_training_is_unaffected(
    make_trainer: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    task, plain = Regression(hidden=3, dropout=0.5), Regression(hidden=3, dropout=0.5)
    data = Data(train=regression_data(16), batch_size=8)
    make_trainer(callbacks=[ModelSummary(costs=True)]).fit(task, data)
    make_trainer(callbacks=[ModelSummary()]).fit(plain, data)

    assert capsys.readouterr().out.count("kept for backward") == 1
    assert torch.equal(task.network[0].weight, plain.network[0].weight)


class InPhases(TaskModule):
    """Two phases that share no layer; the first runs its layer twice as often."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 1), nn.Linear(4, 2)

    def first_step(self, batch: Any) -> Any:
        return self.first(batch[0]).mean() + self.first(2 * batch[0]).mean()

    def second_step(self, batch: Any) -> Any:
        return self.second(batch[0]).mean()

    def configure_phases(self) -> Any:
        parts = {"first": self.first, "second": self.second}
        return [Phase(name, torch.optim.SGD(part.parameters(), lr=0.1)) for name, part in parts.items()]


class DrivenByHand(InPhases):
    manual = True

    def configure_phases(self) -> Any:
        return [replace(phase, step=f"{phase.name}_loss") for phase in super().configure_phases()]

    def manual_step(self, control: Any) -> None:
        control.backward("first", step="first_step")
        control.step("first")


def test_costs_and_graph_of_a_task_with_phases_are_those_of_all_its_steps(
    make_trainer: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    data, graphs = Data(train=regression_data(16), batch_size=8), Graphs()
    trainer = make_trainer(callbacks=[ModelSummary(costs=True), ModelGraph()], loggers=[graphs])
    trainer.fit(InPhases(), data)

    rows = {line.split()[0]: line for line in capsys.readouterr().out.splitlines() if line.strip()}
    assert " 128 " in rows["first"] and " 128 " in rows["second"] and " 256 " in rows["total"]
    assert {"first/linear", "first/linear_2", "second/linear"} <= {one.name for one in graphs.written[0].operations}

    make_trainer(callbacks=[ModelSummary(costs=True), ModelGraph()], loggers=[graphs]).fit(DrivenByHand(), data)
    assert "kept for backward" not in capsys.readouterr().out
    assert len(graphs.written) == 1


class Graphs(MemoryLogger):
    def __init__(self) -> None:
        super().__init__()
        self.written: list[Any] = []

    def write_graph(self, graph: Any) -> None:
        self.written.append(graph)
