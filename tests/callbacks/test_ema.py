from __future__ import annotations

import signal
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from trainkit.callbacks.checkpoint import Checkpoint
from trainkit.callbacks.ema import EMA
from trainkit.callbacks.swa import SWA
from trainkit.strategies.ddp.strategy import DDPStrategy
from trainkit.strategies.fusion.strategy import FusionStrategy
from trainkit.strategies.pipeline.strategy import PipelineStrategy
from trainkit.strategies.single import SingleStrategy

from tests.tasks import EachStep, Regression, StopAt, assert_same_bits, regression_data, weights
from trainkit import Callback, Data, Trainer, UserError
from trainkit.checkpoint.store import load_from
from trainkit.testing import run_ranks


def data() -> Data:
    return Data(train=regression_data(40), validation=regression_data(12, seed=1), batch_size=8)


def adamw(task: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(task.parameters(), lr=0.02)


def task() -> Regression:
    return Regression(adamw, hidden=6)


class Trace(Callback):
    """Keeps the weights after each step, and those that evaluations saw."""

    def __init__(self) -> None:
        self.trained: list[dict[str, Tensor]] = []
        self.evaluated: list[dict[str, Tensor]] = []

    def on_step_end(self, run: Any) -> None:
        self.trained.append(weights(run.task))

    def on_evaluation_start(self, run: Any, stage: str) -> None:
        self.evaluated.append(weights(run.task))


def ema_of(trained: list[dict[str, Tensor]], decay: float) -> dict[str, Tensor]:
    average = {name: tensor.clone() for name, tensor in trained[0].items()}
    for present in trained[1:]:
        for name, tensor in present.items():
            average[name] += (1 - decay) * (tensor - average[name])
    return average


def assert_near(actual: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert actual.keys() == expected.keys()
    for name, tensor in actual.items():
        torch.testing.assert_close(tensor, expected[name], rtol=1e-5, atol=1e-6, msg=name)


def test_evaluations_use_the_average_and_training_does_not(make_trainer: Any) -> None:
    trace, plain = Trace(), Trace()
    settings = {"max_duration": "2epoch", "evaluate_every": "3step"}

    make_trainer(callbacks=[EMA(decay=0.9), trace], **settings).fit(task(), data())
    make_trainer(callbacks=[plain], **settings).fit(task(), data())

    for with_average, without in zip(trace.trained, plain.trained, strict=True):
        assert_same_bits(with_average, without)
    for number, evaluated in enumerate(trace.evaluated, start=1):
        assert_near(evaluated, ema_of(trace.trained[: 3 * number], 0.9))


def test_callbacks_see_the_training_weights_after_an_evaluation(make_trainer: Any) -> None:
    seen: list[Any] = []

    class Observer(Callback):
        def on_evaluation_end(self, run: Any, stage: str, metrics: dict[str, float]) -> None:
            seen.append(weights(run.task))

    trace = Trace()
    make_trainer(callbacks=[EMA(decay=0.9), Observer(), trace], evaluate_every="3step").fit(task(), data())

    assert seen
    for number, after in enumerate(seen, start=1):
        assert_same_bits(after, trace.trained[3 * number - 1])


def test_the_average_is_loaded_at_the_end_unless_disabled(make_trainer: Any) -> None:
    left, not_left, trace = task(), task(), Trace()

    make_trainer(callbacks=[EMA(decay=0.9), trace]).fit(left, data())
    make_trainer(callbacks=[EMA(decay=0.9, load_average_at_end=False)]).fit(not_left, data())

    assert_near(weights(left), ema_of(trace.trained, 0.9))
    assert_same_bits(not_left, trace.trained[-1])


def test_the_average_is_that_of_torchs_averaged_model(make_trainer: Any) -> None:
    made, trace, expected = task(), Trace(), AveragedModel(task(), multi_avg_fn=get_ema_multi_avg_fn(0.9))

    make_trainer(callbacks=[EMA(decay=0.9), trace]).fit(made, data())

    present = task()
    for trained in trace.trained:
        present.load_state_dict(trained)
        expected.update_parameters(present)
    assert_near(weights(made), weights(expected.module))


def test_early_weights_are_forgotten_while_the_average_warms_up(make_trainer: Any) -> None:
    """Updates 1, 2, 3 keep 2/11, 3/12, 4/13 of the average."""
    made, trace = task(), Trace()

    make_trainer(callbacks=[EMA(decay=0.999, warm_up=True), trace], max_duration="4step").fit(made, data())

    average = dict(trace.trained[0])
    for update, present in enumerate(trace.trained[1:], start=1):
        keep = (1 + update) / (10 + update)
        average = {name: keep * average[name] + (1 - keep) * present[name] for name in present}
    assert_near(weights(made), average)


def test_every_and_start_determine_the_updates(make_trainer: Any) -> None:
    """Steps 4, 6, 8 and 10, each update with the decay of two steps."""
    made, trace = task(), Trace()
    ema = EMA(decay=0.9, every=2, start="3step")

    make_trainer(callbacks=[ema, trace], max_duration="10step").fit(made, data())

    assert_near(weights(made), ema_of([trace.trained[step - 1] for step in (4, 6, 8, 10)], 0.81))


def test_swa_is_the_equal_mean_of_the_ends_of_the_last_epochs(make_trainer: Any) -> None:
    made, trace = task(), Trace()

    make_trainer(callbacks=[SWA(start=0.5), trace], max_duration="6epoch").fit(made, data())

    taken = [trace.trained[5 * epoch - 1] for epoch in (3, 4, 5, 6)]
    assert_near(weights(made), {name: torch.stack([t[name] for t in taken]).mean(0) for name in taken[0]})


@pytest.mark.parametrize("make", [lambda: EMA(decay=0.9), lambda: SWA(start="4step", every="2step")])
@pytest.mark.parametrize("checkpoint_is_first", [False, True])
def test_a_resumed_run_has_a_bit_equal_average(
    make_trainer: Any, tmp_path: Path, make: Any, checkpoint_is_first: bool
) -> None:
    settings = {"max_duration": "2epoch", "evaluate_every": "3step"}
    whole, resumed = task(), task()
    make_trainer(callbacks=[make()], **settings).fit(whole, data())

    def callbacks(*more: Callback) -> list[Callback]:
        both = [make(), *more]
        return both[::-1] if checkpoint_is_first else both

    folder = {"run_dir": tmp_path / "parts", **settings}
    make_trainer(callbacks=callbacks(StopAt(6)), **folder).fit(task(), data())
    make_trainer(callbacks=callbacks(Checkpoint(every=None)), **folder).fit(resumed, data(), resume=tmp_path / "parts")

    assert_same_bits(resumed, whole)
    payload = load_from(tmp_path / "parts").payload
    assert_same_bits(payload["evaluation_weights"], whole)
    assert not torch.equal(payload["task"]["network.0.weight"], whole.state_dict()["network.0.weight"])


def test_a_checkpoint_is_evaluated_with_its_average(make_trainer: Any, tmp_path: Path) -> None:
    best = Checkpoint(monitor="validation/loss", every=None)
    trainer = make_trainer(
        callbacks=[EMA(decay=0.8), best], run_dir=tmp_path / "run", evaluate_every="1epoch", max_duration="2epoch"
    )
    fitted = trainer.fit(task(), data())

    metrics = make_trainer().validate(task(), data(), checkpoint=tmp_path / "run")

    assert metrics["validation/loss"] == pytest.approx(fitted.metrics["validation/loss"], rel=1e-6)


def test_the_training_weights_are_restored_after_an_interrupted_evaluation(make_trainer: Any, tmp_path: Path) -> None:
    """The checkpoint of the signal holds the weights of training as such."""

    class Interrupted(Regression):
        def validation_step(self, batch: Any) -> Any:
            signal.raise_signal(signal.SIGTERM)
            return super().validation_step(batch)

    trained = EachStep(lambda run: weights(run.task))
    made = Interrupted(adamw, hidden=6)
    callbacks = [Checkpoint(), EMA(decay=0.9), trained]
    trainer = make_trainer(callbacks=callbacks, run_dir=tmp_path / "run", evaluate_every="3step")

    with pytest.raises(SystemExit):
        trainer.fit(made, data())

    assert len(trained.seen) == 3
    assert_same_bits(load_from(tmp_path / "run").payload["task"], trained.seen[-1])


class Normalised(Regression):
    """With batch-norm statistics and a counter among its buffers."""

    def __init__(self) -> None:
        super().__init__(hidden=6)
        self.norm = nn.BatchNorm1d(4)

    def forward(self, inputs: Tensor) -> Tensor:
        return super().forward(self.norm(inputs))


def test_buffers_are_averaged_and_counters_are_copied(make_trainer: Any) -> None:
    made, trace = Normalised(), Trace()

    make_trainer(callbacks=[EMA(decay=0.9), trace]).fit(made, data())

    assert int(made.norm.num_batches_tracked) == 5
    statistics = [{"mean": step["norm.running_mean"]} for step in trace.trained]
    assert_near({"mean": made.norm.running_mean}, ema_of(statistics, 0.9))


def test_16_bit_weights_are_rejected(make_trainer: Any) -> None:
    with pytest.raises(UserError, match="EMA cannot average 16-bit weights"):
        make_trainer(callbacks=[EMA()], precision="bf16-true").fit(task(), data())


STRATEGIES = {
    "fusion sharded": lambda: FusionStrategy(devices=2, device="cpu", shard_optimizer=True),
    "pipeline": lambda: PipelineStrategy(stages=2, device="cpu"),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", STRATEGIES)
def test_every_strategy_has_the_average_of_single_and_resumes_bit_equal(
    make_trainer: Any, tmp_path: Path, name: str
) -> None:
    def fit(strategy: Any, made: Regression, *more: Callback, **settings: Any) -> Any:
        resume = settings.pop("resume", None)
        settings = {"max_duration": "8step", "evaluate_every": "4step", **settings}
        return make_trainer(strategy, callbacks=[EMA(decay=0.9), *more], **settings).fit(made, data(), resume=resume)

    reference, whole, resumed = task(), task(), task()
    expected = fit(SingleStrategy(device="cpu"), reference)
    result = fit(STRATEGIES[name](), whole)
    fit(STRATEGIES[name](), task(), StopAt(5), run_dir=tmp_path / "parts")
    fit(STRATEGIES[name](), resumed, run_dir=tmp_path / "parts", resume=tmp_path / "parts")

    assert_near(weights(whole), weights(reference))
    assert result.metrics["validation/loss"] == pytest.approx(expected.metrics["validation/loss"], rel=1e-5)
    assert_same_bits(resumed, whole)


def average_on_each_rank() -> tuple[dict[str, Tensor], dict[str, float], list[dict[str, Tensor]]]:
    """Train with an average under ddp; return what the task is left with, the metrics and what evaluations saw."""
    trace, made = Trace(), task()
    settings: dict[str, Any] = {
        "max_duration": "2epoch",
        "evaluate_every": "3step",
        "num_sanity_batches": 0,
        "loggers": [],
        "run_dir": "ranks",
    }
    callbacks = [EMA(decay=0.9), trace]
    result = Trainer(DDPStrategy(device="cpu"), callbacks=callbacks, **settings).fit(made, data())
    return weights(made), result.metrics, trace.evaluated


@pytest.mark.slow
def test_both_ranks_of_ddp_have_the_average_of_one_device(
    make_trainer: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (first, metrics, evaluated), (second, _, _) = run_ranks(average_on_each_rank, 2)
    trace, alone = Trace(), task()
    settings = {"max_duration": "2epoch", "evaluate_every": "3step"}
    result = make_trainer(callbacks=[EMA(decay=0.9), trace], **settings).fit(alone, data())

    assert_same_bits(first, second)
    assert_near(first, weights(alone))
    for of_ranks, of_one in zip(evaluated, trace.evaluated, strict=True):
        assert_near(of_ranks, of_one)
    assert metrics["validation/loss"] == pytest.approx(result.metrics["validation/loss"], rel=1e-5)


def test_a_stage_without_weights_counts_every_update() -> None:
    average, state = EMA(decay=0.9), SimpleNamespace(step=0)
    run: Any = SimpleNamespace(
        strategy=SimpleNamespace(local_state=lambda task: {}, shards=lambda task, phase_optimizers: None),
        task=None,
        state=state,
        resumed_from=None,
        phase_optimizers=[SimpleNamespace(has_mode=False)],
    )
    average.on_fit_start(run)
    for state.step in (1, 2, 3):
        average.on_step_end(run)
    average.on_evaluation_start(run, "validation")
    average.on_evaluation_end(run, "validation", {})
    assert average._updates == 3  # as on the stages that have weights: what they send each other must match
