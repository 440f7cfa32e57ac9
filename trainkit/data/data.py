"""What a run reads: one dataset for each stage, and the global batch."""

from __future__ import annotations

from collections.abc import Sequence, Sized
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    Sampler,
    SequentialSampler,
    TensorDataset,
    default_collate,
)

from trainkit.data.balance import balanced_weights, labels_of, sample_weights
from trainkit.data.readers import Collate
from trainkit.errors import UserError

STAGES = ("train", "validation", "test", "predict")


@dataclass(frozen=True)
class StageData:
    """One stage's dataset and how it is read."""

    stage: str
    dataset: Any
    batch_size: int | None
    """Samples of one global batch; `None`: the dataset's items are ready-made global batches."""
    collate: Collate
    workers: int
    shuffle: bool
    drop_last: bool
    pin_memory: bool
    sampler: Sampler[int] | None = None
    keep_workers: bool = True
    lengths: Sequence[int] | None = None
    """Of the samples, where batches are to be of samples that are about equally long."""
    weights: Tensor | None = None
    """Of the samples, where an epoch is as many draws by weight."""

    @property
    def is_stream(self) -> bool:
        """Whether samples can only be read one after the other."""
        return isinstance(self.dataset, IterableDataset)

    @property
    def num_items(self) -> int | None:
        """Samples (or ready-made batches) of one epoch; unknown for streams without a length."""
        if self.sampler is not None:
            return len(self.sampler)  # type: ignore[arg-type] # checked by `_check`
        return len(self.dataset) if isinstance(self.dataset, Sized) else None


class Data:
    """The datasets of a run.

    `train`, `validation`, `test` and `predict` are each a map-style dataset, an `IterableDataset`, or a ready
    `DataLoader`, whose dataset, collate function, workers and sampler are kept while the strategy decides which
    rank reads what. `batch_size` is the *global batch*: samples of one optimizer step, over all ranks and
    micro-batches; `None` takes it from the `DataLoader`, or says that the items are ready-made batches, which
    ranks and micro-batches then share by rows.

    The order of samples is a pure function of `seed` (the trainer's, unless given here) and the epoch. An
    `IterableDataset` is read in its own order: of each global batch, rank r of W keeps every W-th sample, so each
    rank reads the whole stream; it may have one worker process, not more.

    A map-style dataset may define `get_sample(index, seed)`, which is then called in place of `__getitem__`. The seed
    follows from the run's seed, the epoch and the index alone, so random augmentation that draws from it is the same
    for any number of workers and ranks, any strategy, and after a resume:

        def get_sample(self, index, seed):
            generator = torch.Generator().manual_seed(seed)
            return self.images[index] + 0.1 * torch.randn(self.shape, generator=generator), self.labels[index]

    Without it, worker processes seed python, numpy and torch for each micro-batch, from its first index and the epoch.
    An evaluation always counts as epoch 0.

    `validation` and `test` may also be several datasets by name, whose metrics then are `validation/<name>/loss`. For
    training, `Mixture` and `Sequential` make one dataset of several, and `Packed` makes rows of short sequences. With
    `lengths`, one number for each sample, the samples of a global batch are about equally long.

    With `weights`, one number for each sample of training, an epoch of n samples is n draws with replacement, each
    sample as often as its weight says; `balance_classes` draws all classes alike. It is `True` for a dataset with
    `targets` or `labels` (or a `TensorDataset` whose last tensor is one whole number a sample), or the class of each
    sample. What is drawn is a function of the seed, the epoch and the position, like any other order.
    """

    def __init__(
        self,
        *,
        train: Any = None,
        validation: Any = None,
        test: Any = None,
        predict: Any = None,
        batch_size: int | None = None,
        evaluation_batch_size: int | None = None,
        shuffle: bool = True,
        drop_last: bool = False,
        collate: Collate | None = None,
        workers: int = 0,
        keep_workers: bool = True,
        pin_memory: bool = True,
        lengths: Sequence[int] | None = None,
        weights: Sequence[float] | Tensor | None = None,
        balance_classes: bool | Sequence[Any] | Tensor = False,
        seed: int | None = None,
    ) -> None:
        for name, size in (("batch_size", batch_size), ("evaluation_batch_size", evaluation_batch_size)):
            if size is not None and (isinstance(size, bool) or not isinstance(size, int) or size < 1):
                raise UserError(f"{name} must be a whole number of samples, at least 1, got {size!r}.")
        if workers < 0:
            raise UserError(f"workers must be 0 or more, got {workers}; 0 reads in the training process.")
        self.batch_size = batch_size
        self.evaluation_batch_size = evaluation_batch_size
        self.shuffle = shuffle
        self.drop_last = drop_last
        self.collate = collate
        self.workers = workers
        self.keep_workers = keep_workers
        self.pin_memory = pin_memory
        if weights is not None and balance_classes is not False:
            raise UserError("weights and balance_classes both say how often a sample is drawn; give one of them.")
        self.lengths = lengths
        self.weights = None if weights is None else sample_weights(weights)
        self.balance_classes = balance_classes
        self.seed = seed
        self._balanced: Tensor | None = None  # weights by class, once they are known
        self._datasets = {"train": train, "validation": validation, "test": test, "predict": predict}

    def dataset(self, stage: str) -> Any:
        """Return the dataset or loader of a stage; override to make it only when it is needed."""
        return self._datasets[stage]

    def has(self, stage: str) -> bool:
        """Return whether there is anything to read for `stage`."""
        return self.dataset(stage) is not None

    def source(self, stage: str) -> StageData:
        """Return what is read for `stage`, the first of several; raises UserError for what cannot be read."""
        return next(iter(self.sources(stage).values()))

    def sources(self, stage: str) -> dict[str, StageData]:
        """Return what is read for `stage` by the name of each dataset, `""` for a single one; raises UserError."""
        dataset = self.dataset(stage)
        if dataset is None:
            raise UserError(f"there is no {stage} data; pass Data({stage}=dataset).")
        datasets = _named(stage, dataset) if type(dataset) is dict else {"": dataset}
        sources = {}
        for name, one in datasets.items():
            sources[name] = self._from_loader(stage, one) if isinstance(one, DataLoader) else self._plain(stage, one)
            _check(sources[name])
        return sources

    def _plain(self, stage: str, dataset: Any) -> StageData:
        return StageData(
            stage,
            dataset,
            batch_size=self._batch_size(stage, None),
            collate=self.collate or default_collate,
            workers=self.workers,
            shuffle=self.shuffle and stage == "train",
            drop_last=self.drop_last and stage == "train",
            pin_memory=self.pin_memory,
            keep_workers=self.keep_workers,
            lengths=self.lengths if stage == "train" else None,
            weights=self._weights_of(dataset) if stage == "train" else None,
        )

    def _from_loader(self, stage: str, loader: DataLoader[Any]) -> StageData:
        stream = isinstance(loader.dataset, IterableDataset)
        sampling = loader if stream else _sampling_of(stage, loader)
        return StageData(
            stage,
            loader.dataset,
            batch_size=self._batch_size(stage, sampling.batch_size),
            collate=loader.collate_fn,
            workers=loader.num_workers,
            shuffle=isinstance(sampling.sampler, RandomSampler | DistributedSampler) and stage == "train",
            drop_last=sampling.drop_last and stage == "train",
            pin_memory=loader.pin_memory,
            sampler=None if stream else _own_sampler(stage, sampling.sampler),
            keep_workers=self.keep_workers,
            lengths=self.lengths if stage == "train" else None,
            weights=self._weights_of(loader.dataset) if stage == "train" else None,
        )

    def _weights_of(self, dataset: Any) -> Tensor | None:
        if self.balance_classes is False or self.weights is not None:
            return self.weights
        if self._balanced is None:
            labels = labels_of(dataset) if isinstance(self.balance_classes, bool) else self.balance_classes
            self._balanced = balanced_weights(labels)
        return self._balanced

    def _batch_size(self, stage: str, of_loader: int | None) -> int | None:
        if stage != "train" and self.evaluation_batch_size is not None:
            return self.evaluation_batch_size
        return of_loader if self.batch_size is None or (of_loader and stage != "train") else self.batch_size


def _sampling_of(stage: str, loader: DataLoader[Any]) -> DataLoader[Any] | BatchSampler:
    """Return where the loader's sampler, batch size and drop_last are: in itself, or in its batch sampler."""
    if loader.batch_sampler is None:
        return loader
    if type(loader.batch_sampler) is not BatchSampler:
        raise UserError(
            f"the {stage} DataLoader has a batch_sampler of type {type(loader.batch_sampler).__name__}, which "
            "fixes who reads what; pass a sampler of single indices and a batch_size instead."
        )
    return loader.batch_sampler


def _own_sampler(stage: str, sampler: Any) -> Sampler[int] | None:
    """Return a loader's sampler where it is the user's own, not one that the strategy's replaces."""
    plain_random = type(sampler) is RandomSampler and not sampler.replacement and sampler._num_samples is None
    if plain_random or isinstance(sampler, SequentialSampler | DistributedSampler):
        return None
    if not isinstance(sampler, Sized):
        raise UserError(f"the {stage} DataLoader's sampler {type(sampler).__name__} needs a length (__len__).")
    own: Sampler[int] = sampler  # type: ignore[assignment] # sized, and a sampler as the loader takes it
    return own


def _named(stage: str, datasets: dict[Any, Any]) -> dict[str, Any]:
    """Return several datasets by their names; raises UserError where a stage takes one, or a name is no word."""
    if stage in ("train", "predict"):
        remedy = "Mixture(...) or Sequential(...)" if stage == "train" else "one of them"
        raise UserError(f"the {stage} data is a dict of datasets, and one dataset is wanted; pass {remedy}.")
    if not datasets:
        raise UserError(f"the {stage} data is an empty dict; pass a dataset, or several by name.")
    for name in datasets:
        if not isinstance(name, str) or not name or "/" in name:
            raise UserError(f"the {stage} dataset {name!r} needs a name for its metrics: {stage}/<name>/loss.")
    return datasets


def _check(source: StageData) -> None:
    stage, size, length = source.stage, source.batch_size, source.num_items
    if source.lengths is not None and (source.is_stream or size is None or source.sampler is not None):
        raise UserError(
            "lengths go with samples in an order of trainkit's: no stream, no ready-made batches, no sampler."
        )
    if source.lengths is not None and len(source.lengths) != length:
        raise UserError(
            f"there are {len(source.lengths)} lengths for {length} samples of {stage} data; give one for each."
        )
    if source.weights is not None:
        _check_weights(source)
    if source.is_stream:
        if source.workers > 1:
            raise UserError(
                f"the {stage} data is an IterableDataset with workers={source.workers}: several workers would "
                "repeat it or change its order. Set workers=1 or 0."
            )
        if size is None:
            raise UserError(f"the {stage} data is an IterableDataset of samples; set batch_size.")
        return
    if length is None:
        raise UserError(
            f"the {stage} data of type {type(source.dataset).__name__} has no length; define __len__ and "
            "__getitem__, or make it a torch.utils.data.IterableDataset."
        )
    if length == 0:
        raise UserError(f"the {stage} dataset is empty; check where its samples come from.")
    if size is None and isinstance(source.dataset, TensorDataset):
        raise UserError(f"the {stage} data is a TensorDataset of single samples; set batch_size.")
    if stage == "train" and size is not None and size > length:
        raise UserError(
            f"batch_size={size} is larger than the training data, which has {length} samples; "
            f"set batch_size={length} or less."
        )


def _check_weights(source: StageData) -> None:
    assert source.weights is not None
    what = None
    if source.is_stream:
        what = "an IterableDataset, whose samples come in its own order"
    elif source.batch_size is None:
        what = "ready-made batches; set batch_size and give single samples"
    elif source.sampler is not None:
        what = f"the sampler {type(source.sampler).__name__}, which says what is drawn; leave one of them out"
    elif source.lengths is not None:
        what = "lengths, which put each sample once into an epoch; leave one of them out"
    elif hasattr(source.dataset, "order"):
        what = f"{type(source.dataset).__name__}, which has an order of its own"
    elif not source.shuffle:
        what = "shuffle=False: draws are random; set shuffle=True"
    if what is not None:
        raise UserError(f"weights and balance_classes do not go with {what}.")
    if len(source.weights) != source.num_items:
        raise UserError(
            f"there are weights or classes of {len(source.weights)} samples for {source.num_items} samples of "
            f"{source.stage} data; give one for each."
        )
