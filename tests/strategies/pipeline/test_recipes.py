"""The shipped recipes under a Trainer: a pipeline gives what one process gives."""

import functools
import json
from itertools import chain

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset
from trainkit.callbacks.checkpoint import Checkpoint
from trainkit.recipes.char_lm import CharLM, SourceFiles
from trainkit.recipes.digits import DigitsData, DigitsTask
from trainkit.recipes.digits_mlp import DigitsMLP
from trainkit.recipes.gan import DigitsGAN, DigitsWithNoise
from trainkit.strategies.pipeline.strategy import PipelineStrategy
from trainkit.strategies.single import SingleStrategy

from trainkit.callback import Callback
from trainkit.checkpoint.store import load_from
from trainkit.trainer import Trainer


class _Forgetful(DigitsMLP):
    """Has dropout between its layers."""

    def __init__(self):
        super().__init__(width=16, depth=4)
        layers = [(layer, nn.Dropout(0.3)) if isinstance(layer, nn.ReLU) else (layer,) for layer in self.network]
        self.network = nn.Sequential(*chain.from_iterable(layers))


class _Noisy(TensorDataset):
    """Adds noise that follows from each sample's own seed."""

    def get_sample(self, index, seed):
        image, digit = self[index]
        return image + 0.3 * torch.randn(image.shape, generator=torch.Generator().manual_seed(seed)), digit


class _NoisyDigits(DigitsData):
    def dataset(self, stage):
        plain = super().dataset(stage)
        return _Noisy(*plain.tensors) if stage == "train" else plain


DIGITS = {"num_train": 74, "batch_size": 16, "evaluation_batch_size": 100}
TEXT = {"context": 12, "max_bytes": 100000, "batch_size": 10, "evaluation_batch_size": 16}
RECIPES = {
    "digits": (functools.partial(DigitsTask, width=4), functools.partial(DigitsData, **DIGITS)),
    "gan": (functools.partial(DigitsGAN, width=16, generator_every=2), functools.partial(DigitsWithNoise, **DIGITS)),
    "digits_mlp": (functools.partial(DigitsMLP, width=16), functools.partial(DigitsData, **DIGITS)),
    "digits augmented": (functools.partial(DigitsMLP, width=16), functools.partial(_NoisyDigits, **DIGITS)),
    "digits with dropout": (_Forgetful, functools.partial(DigitsData, **DIGITS)),
    "char_lm": (
        functools.partial(CharLM, context=12, width=16, layers=2, heads=2),
        functools.partial(SourceFiles, **TEXT),
    ),
}


def _trainer(strategy, run_dir, *, duration="6step", callbacks=()):
    return Trainer(
        strategy,
        run_dir=run_dir,
        callbacks=list(callbacks),
        max_duration=duration,
        evaluate_every="3step",
        limit_validation_batches=2,
        precision="fp64",
        max_grad_norm=1.0,
    )


def _fit(name, strategy, run_dir, **settings):
    make_task, make_data = RECIPES[name]
    resume = settings.pop("resume", None)
    torch.manual_seed(0)
    task, data = make_task().double(), make_data()
    trainer = _trainer(strategy, run_dir, **settings)
    result = trainer.fit(task, data, resume=resume)
    return task, data, trainer, result


def _difference(first, second):
    first, second = first.state_dict(), second.state_dict()
    assert list(first) == list(second)
    return max(float((first[name].double() - second[name].double()).abs().max()) for name in first)


def _same(first, second):
    assert first.keys() == second.keys()
    timed = ("per_second", "seconds")
    return all(
        first[name] == pytest.approx(second[name], rel=1e-6) for name in first if not any(t in name for t in timed)
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "stages", "schedule"), [("char_lm", 2, "1f1b"), ("digits", 4, "1f1b"), ("digits_mlp", 2, "gpipe")]
)
def test_a_recipe_has_the_weights_and_metrics_of_one_process(name, stages, schedule, tmp_path):
    expected, _, _, single = _fit(name, SingleStrategy(device="cpu"), tmp_path / "single")

    pipeline = PipelineStrategy(stages=stages, schedule=schedule, device="cpu", record_timeline=True)
    task, _, _, result = _fit(name, pipeline, tmp_path / "pipeline")

    assert _difference(task, expected) <= 1e-10
    assert _same(result.metrics, single.metrics)
    assert {"validation/loss", "train/loss"} <= result.metrics.keys()
    plan = json.loads((tmp_path / "pipeline" / "partition.json").read_text())
    assert [stage["stage"] for stage in plan["stages"]] == list(range(stages))
    assert "slowest stage" in (tmp_path / "pipeline" / "partition.txt").read_text()
    timeline = (tmp_path / "pipeline" / "timeline.json").read_text()
    assert f"rank {stages - 1}" in timeline and "equal stages" in timeline


@pytest.mark.slow
def test_a_run_under_a_pipeline_goes_on_under_one_process_and_predicts_the_same(tmp_path):
    expected, data, trainer, single = _fit("digits_mlp", SingleStrategy(device="cpu"), tmp_path / "single")
    wanted = trainer.predict(expected, data)
    run = tmp_path / "pipeline"

    task, _, trainer, _ = _fit(
        "digits_mlp",
        PipelineStrategy(stages=2, device="cpu", split_points=["network.3"]),
        run,
        duration="3step",
        callbacks=[Checkpoint(every=None)],
    )
    early = trainer.predict(task, data)
    resumed, _, trainer, result = _fit("digits_mlp", SingleStrategy(device="cpu"), run, resume=run)

    assert early.shape == wanted.shape
    assert _difference(resumed, expected) <= 1e-10
    assert result.metrics["validation/loss"] == pytest.approx(single.metrics["validation/loss"], rel=1e-9)
    assert torch.equal(trainer.predict(resumed, data), wanted)


@pytest.mark.slow
def test_two_stages_and_two_replicas_have_the_weights_of_one_process_on_augmented_samples(tmp_path):
    expected, data, trainer, single = _fit("digits augmented", SingleStrategy(device="cpu"), tmp_path / "single")
    wanted = trainer.predict(expected, data)

    strategy = PipelineStrategy(stages=2, replicas=2, device="cpu", split_points=["network.3"])
    task, _, trainer, result = _fit("digits augmented", strategy, tmp_path / "pipeline")

    assert _difference(task, expected) <= 1e-10
    assert _same(result.metrics, single.metrics)
    assert torch.equal(trainer.predict(task, data), wanted)


@pytest.mark.slow
def test_a_run_that_is_resumed_with_dropout_is_equal_to_the_bit(tmp_path):
    settings = {"callbacks": [Checkpoint(every="3step", save_last_k=5)]}
    whole, *_ = _fit("digits with dropout", PipelineStrategy(stages=2, device="cpu"), tmp_path / "whole", **settings)
    half = tmp_path / "whole" / "checkpoints" / "step_00000003.pt"

    resumed, *_ = _fit(
        "digits with dropout", PipelineStrategy(stages=2, device="cpu"), tmp_path / "resumed", resume=half
    )

    assert load_from(half).payload["strategy"]["pipeline"]["settings"].startswith("2 x 1 stages")
    assert _difference(resumed, whole) == 0.0


class _StopAfter(Callback):
    def __init__(self, step):
        self.step = step

    def on_step_end(self, run):
        if run.state.step == self.step:
            run.checkpointer.save(reason="the next strategy's turn")
            run.request_stop("the next strategy's turn")


def _handed_on(name, strategies, run):
    """Train two steps under each strategy, each going on from the checkpoint of the one before."""
    for part, strategy in enumerate(strategies):
        task, _, trainer, result = _fit(
            name,
            strategy,
            run,
            duration=f"{2 * len(strategies)}step",
            callbacks=[_StopAfter(2 * part + 2)],
            resume=run if part else None,
        )
    return task, trainer, result


@pytest.mark.slow
def test_a_run_in_phases_goes_from_one_process_to_two_stages_and_back(tmp_path):
    expected, data, trainer, single = _fit("gan", SingleStrategy(device="cpu"), tmp_path / "single", duration="6step")
    wanted = trainer.predict(expected, data)
    strategies = [
        SingleStrategy(device="cpu"),
        PipelineStrategy(stages=2, device="cpu", split_points=["generator.3"]),
        SingleStrategy(device="cpu"),
    ]
    task, trainer, result = _handed_on("gan", strategies, tmp_path / "run")

    assert _difference(task, expected) <= 1e-10
    assert torch.allclose(trainer.predict(task, data), wanted, rtol=0, atol=1e-10)
    assert result.metrics["validation/distance"] == pytest.approx(single.metrics["validation/distance"], rel=1e-6)


@pytest.mark.slow
def test_a_run_goes_from_one_process_to_four_stages_to_two_and_back(tmp_path):
    expected, data, trainer, _ = _fit("char_lm", SingleStrategy(device="cpu"), tmp_path / "single", duration="8step")
    wanted = trainer.test(expected, data)
    strategies = [
        SingleStrategy(device="cpu"),
        PipelineStrategy(stages=4, device="cpu"),
        PipelineStrategy(stages=2, device="cpu", schedule="gpipe"),
        SingleStrategy(device="cpu"),
    ]
    task, _, _ = _handed_on("char_lm", strategies, tmp_path / "run")

    assert _difference(task, expected) <= 1e-10
    tested = Trainer(PipelineStrategy(stages=2, device="cpu"), precision="fp64", callbacks=[], loggers=[]).test(
        task, data
    )
    assert tested == pytest.approx(wanted, rel=1e-9)
