from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
import torch
from trainkit.callbacks.gradual_unfreezing import GradualUnfreezing

from tests.tasks import Regression, assert_same_bits, fit, on_cpu, regression_data, weights
from trainkit import Callback, Data, UserError
from trainkit.testing import run_ranks


class Steps(Callback):
    def __init__(self) -> None:
        self.steps: list[dict[str, torch.Tensor]] = []

    def on_fit_start(self, run: Any) -> None:
        self.steps.append(weights(run.task))

    def on_step_end(self, run: Any) -> None:
        self.steps.append(weights(run.task))


def adamw(task: Any) -> Any:
    return torch.optim.AdamW(task.parameters(), lr=0.05, weight_decay=0.1)


def trained(make_trainer: Any, at: dict[str, str], **settings: Any) -> list[dict[str, torch.Tensor]]:
    steps = Steps()
    trainer = make_trainer(callbacks=[GradualUnfreezing(unfreeze_at=at), steps], max_duration="2epoch", **settings)
    trainer.fit(Regression(adamw, hidden=3), Data(train=regression_data(32), batch_size=8))
    return steps.steps


@pytest.mark.parametrize("settings", [{}, {"max_grad_norm": 0.1}])
def test_matching_parameters_are_bit_equal_until_unfrozen(make_trainer: Any, settings: Any) -> None:
    """Weight decay would move a parameter whose gradient were zero."""
    steps = trained(make_trainer, {"network.0.*": "1epoch", "network.0.bias": "6step"}, **settings)

    def moves(name: str) -> list[bool]:
        return [not torch.equal(a[name], b[name]) for a, b in pairwise(steps)]

    assert moves("network.0.weight") == [False] * 4 + [True] * 4
    assert moves("network.0.bias") == [False] * 6 + [True] * 2
    assert moves("network.3.weight") == [True] * 8


def test_batch_norms_keep_their_statistics_until_unfrozen(make_trainer: Any, tmp_path: Any) -> None:
    class Normed(Regression):
        def __init__(self) -> None:
            super().__init__(adamw)
            self.norm = torch.nn.BatchNorm1d(4)

        def forward(self, inputs: torch.Tensor) -> torch.Tensor:
            return super().forward(self.norm(inputs))

    def moves(**settings: Any) -> list[bool]:
        steps = Steps()
        freeze = GradualUnfreezing(unfreeze_at={"norm.*": "1epoch", "norm.weight": "6step"})
        trainer = make_trainer(callbacks=[freeze, steps, "checkpoint"], evaluate_every="1step", **settings)
        data = Data(train=regression_data(32), validation=regression_data(8), batch_size=8)
        task = Normed()
        trainer.fit(task, data, resume=tmp_path / "run" if resumes else None)
        assert type(task.norm) is torch.nn.BatchNorm1d
        return [not torch.equal(a["norm.running_mean"], b["norm.running_mean"]) for a, b in pairwise(steps.steps)]

    resumes = False
    assert moves(max_duration="2epoch") == [False] * 4 + [True] * 4
    assert moves(max_duration="3step", run_dir=tmp_path / "run") == [False] * 3
    resumes = True
    assert moves(max_duration="5step", run_dir=tmp_path / "run") == [False, True]
    assert moves(max_duration="7step", run_dir=tmp_path / "run") == [True] * 2


def test_frozen_parameters_do_not_count_in_the_norm(make_trainer: Any) -> None:
    """Clipped to the same norm, the head moves as if the rest were not there."""
    steps = trained(make_trainer, {"network.0.*": "2epoch"}, max_grad_norm=0.01)
    task = Regression(lambda task: torch.optim.AdamW(task.network[3].parameters(), lr=0.05, weight_decay=0.1), hidden=3)
    task.network[0].requires_grad_(False)
    make_trainer(max_duration="2epoch", max_grad_norm=0.01).fit(task, Data(train=regression_data(32), batch_size=8))

    assert_same_bits(weights(task), steps[-1])


def test_a_pattern_without_matches_is_rejected(make_trainer: Any) -> None:
    with pytest.raises(UserError, match=r"at\.encoder\.\* matches no parameter\. There are: network\.0\.weight"):
        trained(make_trainer, {"encoder.*": "1epoch"})


def test_a_list_of_patterns_is_rejected() -> None:
    with pytest.raises(UserError, match=r"unfreeze_at=\['encoder'\] is not a mapping; write \{'encoder"):
        GradualUnfreezing(unfreeze_at=["encoder"])


def weights_on_this_rank(run_dir: str, strategy: str) -> dict[str, torch.Tensor]:
    task = Regression(lambda task: torch.optim.SGD(task.parameters(), lr=1.0), hidden=3)
    data = Data(train=regression_data(32), batch_size=8)
    unfreezing = GradualUnfreezing(unfreeze_at={"network.0.*": "1epoch"})
    settings = {"max_duration": "2epoch", "max_grad_norm": 0.01, "run_dir": run_dir}
    fit(on_cpu(strategy), task, data, unfreezing, **settings)
    return weights(task)


@pytest.mark.parametrize("strategy", ["ddp", "torch_ddp", "fusion"])
def test_frozen_parameters_do_not_count_in_the_norm_of_ranks(tmp_path: Any, strategy: str) -> None:
    single = weights_on_this_rank(str(tmp_path / "single"), "single")
    for found in run_ranks(weights_on_this_rank, 2, str(tmp_path / strategy), strategy):
        for name, expected in single.items():
            torch.testing.assert_close(found[name], expected, rtol=1e-5, atol=1e-6)
