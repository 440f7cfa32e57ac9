from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from trainkit.callbacks.memory_report import MemoryReport

from tests.tasks import Regression, data


def test_a_report_is_written_when_memory_runs_out(make_trainer: Any, tmp_path: Path) -> None:
    class Large(Regression):
        steps = 0

        def training_step(self, batch: Any) -> Any:
            self.steps += 1
            if self.steps == 3:
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
            return super().training_step(batch)

    task = Large(lambda task: torch.optim.AdamW(task.parameters()), hidden=3)
    with pytest.raises(torch.OutOfMemoryError):
        make_trainer(callbacks=[MemoryReport()], run_dir=tmp_path / "run").fit(task, data())

    report = (tmp_path / "run" / "out_of_memory_rank_0.txt").read_text()
    assert report.startswith("out of memory at step 3 on process 0: CUDA out of memory.")
    assert "now: global batch 8 = 1 rank x 1 micro-batch x 8 samples" in report
    assert "strategy.micro_batch_size=4: the same global batch" in report
    assert "strategy.micro_batch_size=auto" in report
    assert "trainer.precision=bf16-mixed" in report
    assert "strategy=fsdp: each rank keeps its shard" in report


def test_the_memory_table_adds_up(make_trainer: Any, capsys: pytest.CaptureFixture[str]) -> None:
    """19 parameters of four bytes; Adam keeps two numbers for each, and a step count."""
    task = Regression(lambda task: torch.optim.AdamW(task.parameters()), hidden=3)
    make_trainer(callbacks=[MemoryReport()]).fit(task, data())

    rows = {line.rsplit(maxsplit=2)[0].strip(): line.split()[-2:] for line in capsys.readouterr().out.splitlines()}
    assert rows["parameters"] == ["76", "B"]
    assert rows["gradients, in a step"] == ["76", "B"]
    assert rows["optimizer"] == [str(2 * 76 + 4 * 4), "B"]
