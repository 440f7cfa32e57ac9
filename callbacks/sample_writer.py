"""Predictions for a few samples at each validation."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any

import torch
from annotated_types import Ge
from torch import Tensor

from trainkit.callback import Callback
from trainkit.data.batch import MicroBatch
from trainkit.data.readers import make_reader
from trainkit.errors import UserError
from trainkit.files import optional_file, write_text
from trainkit.rng import preserve_rng
from trainkit.run import Run
from trainkit.settings import check_arguments
from trainkit.task import evaluation_mode
from trainkit.tree import map_tensors


class SampleWriter(Callback):
    """Writes the predictions for the first samples of the validation data, before each validation.

    Predictions are what `predict_step` returns: one line per sample in `samples/step_<n>.txt`, and a text for the
    loggers. A task may define the line by `describe_sample(sample, prediction)`. An average of weights is used if its
    callback comes earlier in the list. Every rank predicts the same samples, which is collective in a pipeline.

    Args:
        num_samples: Number of samples.

    """

    def __init__(self, *, num_samples: Annotated[int, Ge(1)] = 8) -> None:
        check_arguments(SampleWriter.__init__, locals(), of="sample_writer")
        self.num_samples = num_samples

    def on_evaluation_start(self, run: Run, stage: str) -> None:
        if stage != "validation" or not run.phase_optimizers:
            return
        source = run.data.stage_data("validation")
        if source.is_iterable or source.batch_size is None:
            raise UserError("sample_writer needs a map-style validation dataset of samples, not a stream or batches.")
        count = min(self.num_samples, len(source.dataset))
        # The samples must not change what follows: modes and random generators are restored.
        with evaluation_mode(run.task), preserve_rng(), torch.no_grad():
            reader = make_reader(source.dataset, source.collate_fn, seed=run.seed, seed_samples=source.seed_samples)
            batch = reader(torch.arange(count), 0)
            # Collective in a pipeline: every rank predicts, and the main rank writes.
            predictions = run.strategy.predict(run.task, MicroBatch(batch, count))
        if run.is_main:
            text = "\n".join(_lines(run.task, batch, predictions, count))
            run.log_text("samples", text)
            if run.run_dir is not None:
                folder = run.run_dir / "samples"
                with optional_file(folder):  # one warning for all of its files
                    folder.mkdir(exist_ok=True)
                    write_text(folder / f"step_{run.state.step:08d}.txt", f"{text}\n")


def _lines(task: Any, batch: Any, predictions: Any, count: int) -> Iterator[str]:
    describe = getattr(task, "describe_sample", None)
    for row in range(count):
        sample, prediction = _row(batch, row, count), _row(predictions, row, count)
        yield str(describe(sample, prediction)) if describe else f"{row}: {map_tensors(prediction, Tensor.tolist)}"


def _row(batch: Any, row: int, count: int) -> Any:
    # A list of samples that the collate function left as it is: its items are rows, not tensors of rows.
    if isinstance(batch, list) and len(batch) == count and not any(isinstance(item, Tensor) for item in batch):
        return batch[row]
    return map_tensors(batch, lambda t: t[row].cpu() if t.dim() and t.shape[0] == count else t.cpu())
