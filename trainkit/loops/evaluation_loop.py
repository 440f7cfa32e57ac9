"""EvaluationLoop: validate, test and predict."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Literal

import torch

from trainkit.data.loader import BatchLoader
from trainkit.metrics.accumulate import WeightedMeans
from trainkit.metrics.step_output import StepOutput
from trainkit.metrics.sync import detach_metrics
from trainkit.rng import preserve_rng
from trainkit.run import EvaluationProgress, Run
from trainkit.strategy import evaluation_batches, metric_modules
from trainkit.task import evaluation_mode
from trainkit.tree import concatenate


class EvaluationLoop:
    """Evaluates every sample exactly once; ranks communicate only at the end of each dataset.

    `loaders` are those of one dataset, named `""`, or of several.
    """

    loaders: Mapping[str, BatchLoader]
    """By the prefix of their metrics: `validation`, or `validation/<name>`."""

    def __init__(self, run: Run, loaders: Mapping[str, BatchLoader], *, stage: str) -> None:
        self._run, self._stage = run, stage
        self.loaders = {f"{stage}/{name}" if name else stage: loader for name, loader in loaders.items()}

    def run(self) -> dict[str, float] | None:
        """Return the metrics by their full names (`validation/loss`); `None` if a stop was requested. Collective.

        Leaves the mode of each module and the random generators as they were.
        """
        metrics: dict[str, float] = {}
        with self._evaluating() as progress:
            for prefix, loader in self.loaders.items():
                reduced = self._evaluate(loader, progress)
                if reduced is None:
                    return None
                metrics.update({f"{prefix}/{metric}": value for metric, value in reduced.items()})
        # A few batches before training say nothing about the weights: no logger gets them.
        if self._stage != "sanity":
            self._run.log(metrics)
        return metrics

    def _evaluate(self, loader: BatchLoader, progress: EvaluationProgress) -> dict[str, float] | None:
        """Return the metrics of one dataset over all ranks, `None` if a stop was requested; collective."""
        run, strategy = self._run, self._run.strategy
        step_name: Literal["validation_step", "test_step"] = "test_step" if self._stage == "test" else "validation_step"
        means, num_samples = WeightedMeans(strategy.device), 0
        # The states of metrics in the task are those of training, and continue there after the evaluation.
        with detach_metrics(metric_modules(strategy, run.task)):
            for micro_batch in evaluation_batches(strategy, run.task, loader.batches(), step_name):
                output = strategy.evaluate(run.task, micro_batch, step_name)
                means.add([output])
                progress.batch += 1
                num_samples += micro_batch.num_samples
                if strategy.comm.should_stop_evaluation(run.signals.received is not None):
                    break
            # Ranks may have unequal numbers of batches, so they agree only here. One that returned alone would leave
            # the others waiting in the reduction below.
            if strategy.comm.any_rank(run.signals.received is not None):
                return None
            of_callbacks: dict[str, float] = {}
            # Before the reduction, so that metrics of callbacks are averaged over ranks too.
            run.emit("on_dataset_end", self._stage, of_callbacks)
            # The values of a rank count by its samples: without any it adds none.
            if of_callbacks and num_samples:
                means.add([StepOutput(None, num_samples, {**of_callbacks})])
            return means.reduce(strategy.comm)

    def predict(self) -> Any:
        """Return the predictions in the order of the dataset, joined along the first dimension, on rank 0."""
        run = self._run
        outputs = []
        with self._evaluating() as progress:
            batches = next(iter(self.loaders.values())).batches()
            for micro_batch in evaluation_batches(run.strategy, run.task, batches, "predict_step"):
                outputs.append(run.strategy.predict(run.task, micro_batch))
                progress.batch += 1
                if run.strategy.comm.should_stop_evaluation(run.signals.received is not None):
                    break
            if run.strategy.comm.any_rank(run.signals.received is not None):
                return []  # not those of some samples, as if they were all
            gathered = run.strategy.comm.gather_predictions(outputs)
        return concatenate(gathered) if gathered else []

    @contextmanager
    def _evaluating(self) -> Iterator[EvaluationProgress]:
        """Evaluation mode, no gradients, and random generators and the mode of each module restored at the end."""
        run = self._run
        step_counts = [loader.num_steps for loader in self.loaders.values() if loader.num_steps is not None]
        # The total is known only if every dataset has a length.
        progress = EvaluationProgress(self._stage, sum(step_counts) if len(step_counts) == len(self.loaders) else None)
        run.evaluation = progress
        run.emit("on_evaluation_start", self._stage)
        try:
            # Not inference mode: a tensor that a model caches in it could not be used in training later.
            with evaluation_mode(run.task), preserve_rng(), torch.no_grad():
                yield progress
        finally:
            # Also after an error: the record of a later failure would name this evaluation.
            run.evaluation = None
