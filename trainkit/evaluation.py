"""The control flow of evaluation and prediction."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Literal

import torch

from trainkit.batches import concatenate
from trainkit.exact_means import ExactMeans, Sums, means_over
from trainkit.feed import Feed
from trainkit.metric_objects import MetricObjects
from trainkit.metric_states import set_aside
from trainkit.rng import rng_untouched
from trainkit.run import EvaluationProgress, Run
from trainkit.step_output import StepOutput
from trainkit.strategy import metric_modules

_STEP_NAMES: dict[str, Literal["validation_step", "test_step"]] = {
    "validation": "validation_step",
    "sanity": "validation_step",
    "test": "test_step",
}


class EvalLoop:
    """Evaluates every sample exactly once; ranks meet only at the end of each dataset.

    `feeds` are those of one dataset, named `""`, or of several.
    """

    def __init__(self, run: Run, feeds: Mapping[str, Feed], *, stage: str) -> None:
        self._run = run
        self._feeds = feeds
        self._stage = stage

    def run(self) -> dict[str, float] | None:
        """Return the metrics by their full names (`validation/loss`), `None` if a stop was asked for meanwhile.

        Leaves the task in evaluation mode and the random generators as they were.
        """
        metrics: dict[str, float] = {}
        with self._evaluating() as progress:
            for name, feed in self._feeds.items():
                reduced = self._evaluate(feed, progress)
                if reduced is None:
                    return None
                prefix = f"{self._stage}/{name}" if name else self._stage
                metrics.update({f"{prefix}/{metric}": value for metric, value in reduced.items()})
        if self._stage != "sanity":
            self._run.log(metrics)
        return metrics

    def _evaluate(self, feed: Feed, progress: EvaluationProgress) -> dict[str, float] | None:
        """Return the metrics of one dataset over all ranks, `None` if a stop was asked for; collective."""
        run, stage, strategy = self._run, self._stage, self._run.strategy
        means, objects, num_samples = ExactMeans(strategy.device), MetricObjects(), 0
        with set_aside(metric_modules(strategy, run.task)):
            for micro_batch in feed.batches():
                output = strategy.evaluate(run.task, micro_batch, _STEP_NAMES[stage])
                means.add(output)
                objects.add(output)
                progress.batch += 1
                num_samples += micro_batch.num_samples
                if strategy.comm.should_stop_evaluation(run.signals.received is not None):
                    break
            if strategy.comm.any_rank(run.signals.received is not None):
                return None
            of_callbacks: dict[str, float] = {}
            run.emit("on_dataset_end", stage, of_callbacks)
            if of_callbacks and num_samples:
                means.add(StepOutput(None, num_samples, {**of_callbacks}))
            return self._over_all_ranks(means, objects)

    def _over_all_ranks(self, means: ExactMeans, objects: MetricObjects) -> dict[str, float]:
        """Return means and metrics over the samples of all ranks; one collective, two where there are objects."""
        strategy = self._run.strategy
        gathered = strategy.comm.all_gather_object((means.sums(), objects.parts(strategy.comm.rank)))
        ranks: dict[int, Sums] = {}
        for sums, (rank, _) in gathered:
            ranks.setdefault(rank, sums)  # those that share a rank's samples have the same
        reduced = means_over(ranks)
        if any(counted for _, (_, counted) in gathered):
            reduced.update(objects.compute([parts for _, parts in gathered], strategy.comm))
        return reduced

    def predict(self) -> Any:
        """Return the predictions in the order of the dataset, joined along the first dimension, on rank 0."""
        run = self._run
        outputs = []
        with self._evaluating() as progress:
            for micro_batch in next(iter(self._feeds.values())).batches():
                outputs.append(run.strategy.predict(run.task, micro_batch))
                progress.batch += 1
                if run.strategy.comm.should_stop_evaluation(run.signals.received is not None):
                    break
            if run.strategy.comm.any_rank(run.signals.received is not None):
                return []  # not those of some samples, as if they were all
            gathered = run.strategy.comm.gather_predictions(outputs)
        return concatenate(gathered) if gathered else []

    def _evaluating(self) -> AbstractContextManager[EvaluationProgress]:
        steps = [feed.num_steps for feed in self._feeds.values()]
        known = [count for count in steps if count is not None]
        return _evaluating(self._run, EvaluationProgress(self._stage, sum(known) if len(known) == len(steps) else None))


@contextmanager
def _evaluating(run: Run, progress: EvaluationProgress) -> Iterator[EvaluationProgress]:
    """Evaluation mode, no gradients, and random generators that training does not notice."""
    run.evaluation = progress
    run.emit("on_evaluation_start", progress.stage)
    run.task.eval()
    try:
        # Not inference mode: a tensor that a model caches in it could not be used in training later.
        with rng_untouched(), torch.no_grad():
            yield progress
    finally:
        run.evaluation = None
