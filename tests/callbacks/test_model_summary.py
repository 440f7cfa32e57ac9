from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from trainkit.callbacks.checkpoint import Checkpoint
from trainkit.callbacks.model_summary import ModelSummary, summary

from trainkit.trainer import FitResult

Fit = Callable[..., FitResult]


class Model(nn.Module):
    """Two layers that share a weight, one frozen, one with buffers, and a parameter of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(10, 4)
        self.head = nn.Linear(4, 10, bias=False)
        self.head.weight = self.embedding.weight
        self.frozen = nn.Linear(4, 4).requires_grad_(False)
        self.norm = nn.BatchNorm1d(4)
        self.scale = nn.Parameter(torch.ones(1))


def test_every_direct_sub_module_has_a_row_and_shared_weights_count_once_in_the_sum() -> None:
    assert summary(Model(), max_rows=20).rows == [
        ["embedding", "Embedding", "40", "40", "160 B"],
        ["head", "Linear", "40", "40", "160 B"],
        ["frozen", "Linear", "20", "0", "80 B"],
        ["norm", "BatchNorm1d", "8", "8", "72 B"],
        ["(its own)", "", "1", "1", "4 B"],
        ["total", "", "69", "49", "316 B"],
    ]


def test_a_long_list_is_cut_and_the_sum_is_still_of_all() -> None:
    rows = summary(nn.Sequential(*[nn.Linear(1, 1, bias=False) for _ in range(30)]), max_rows=2).rows

    assert [row[0] for row in rows] == ["0", "1", "28 more", "total"]
    assert rows[-1][2] == "30"


def test_sizes_are_in_binary_units() -> None:
    assert summary(nn.Linear(1024, 1024, bias=False), max_rows=20).rows[-1][-1] == "4.0 MiB"


def test_the_header_says_what_will_run_where(
    fit: Fit, scripted: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    fit(scripted(), ModelSummary())

    printed = capsys.readouterr().out
    assert "strategy     SingleDevice on cpu" in printed
    assert "precision    fp32" in printed
    assert "batches      global batch 4 = 1 rank x 1 micro-batch x 4 samples" in printed
    assert "steps        20" in printed
    assert f"run folder   {tmp_path / 'run'}" in printed
    assert "resumed" not in printed


def test_the_header_of_a_resumed_run_says_from_where(
    fit: Fit, scripted: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    fit(scripted(), Checkpoint(), max_duration="4step")

    fit(scripted(), ModelSummary(), resume=tmp_path / "run")

    assert f"resumed      from {tmp_path / 'run'} at step 4" in capsys.readouterr().out
