"""Data: the dataset of each stage and the global batch size."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Sequence, Sized
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any

import torch
from annotated_types import Ge, Unit
from torch import Tensor
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    Sampler,
    SequentialSampler,
    Subset,
    TensorDataset,
    default_collate,
)

from trainkit.data.dataset_shards import num_shards_of
from trainkit.data.opened_shards import StatefulIterable, as_iterable, check_undivided
from trainkit.data.readers import Collate, StartWorker, start_worker
from trainkit.errors import UserError
from trainkit.settings import check_arguments, named_arguments

STAGES = ("train", "validation", "test", "predict")
MAX_WORKERS_PER_CORE = 8  # above 1, as workers also wait for files; a bound against typing errors
_LOADERS = ("torch.utils.data.dataloader", "torchdata.stateful_dataloader.stateful_dataloader")
_SAMPLERS = ("torch.utils.data.sampler", "torchdata.stateful_dataloader.sampler")
"""Modules of the loaders and samplers that the strategy's own replace."""


@dataclass(frozen=True)
class StageData:
    """One stage's dataset and how it is read."""

    stage: str
    dataset: Any
    batch_size: int | None
    """Samples of one global batch; `None` if the dataset is pre-batched: its items are global batches."""
    collate_fn: Collate
    num_workers: int
    shuffle: bool
    drop_last: bool
    pin_memory: bool
    sampler: Sampler[int] | None = None
    persistent_workers: bool = True
    seed_samples: bool = True
    start_worker: StartWorker = start_worker
    lengths: Sequence[int] | None = None
    """One length for each sample, to group samples of similar length."""
    sample_weights: Tensor | None = None
    """One weight for each sample, to draw samples with replacement."""

    @property
    def is_iterable(self) -> bool:
        """True if the dataset can only be read from start to end."""
        return isinstance(self.dataset, IterableDataset)

    @property
    def num_items(self) -> int | None:
        """Samples (or pre-batched items) of one epoch; `None` for an iterable dataset without a length."""
        if self.sampler is not None:
            return len(self.sampler)  # type: ignore[arg-type] # checked by `_check`
        return len(self.dataset) if isinstance(self.dataset, Sized) else None


class Data:
    """The datasets of a run.

    `train`, `validation`, `test` and `predict` are each a map-style dataset, an `IterableDataset`, or a `DataLoader`,
    whose dataset, collate function, workers and sampler are kept while the strategy decides which rank reads which
    samples. `batch_size` is the *global batch*: samples of one optimizer step, over all ranks and micro-batches. If it
    is `None`, the `DataLoader`'s is used; without that the dataset is pre-batched, and the rows of each item are
    split over ranks and micro-batches.

    The order of samples is a pure function of `seed` (the trainer's, unless given here) and the epoch. An
    `IterableDataset` is read in its own order, with at most one worker: of each global batch, rank r of W keeps every
    W-th sample, so each rank reads the whole dataset. One with `num_shards` and `shard(num_shards, index)`, as
    `trainkit.Files` and those of Hugging Face datasets, is read one sample of each shard in turn, by ranks and workers
    that divide the shards. The items of `DataLoader(dataset, batch_size=None)` are global batches. A
    `StatefulDataLoader` of torchdata is read as a `DataLoader`, and a `torchdata.nodes.Loader` as an `IterableDataset`
    with a state.

    What a map-style dataset draws from the global generators of python, numpy and torch is seeded before each sample,
    by the run's seed, the epoch and the index alone; so random augmentation is the same for any number of workers and
    ranks, any strategy, and after a resume. Where an order repeats samples within an epoch, the position in it takes
    the place of the index. What a collate function draws is seeded by its first sample, and differs with the number
    of ranks. For an `IterableDataset` without shards the generators are seeded before each global batch, by the run's
    seed, the epoch and the position. With `seed_samples=False` the dataset draws from the generators of the process,
    or of workers that seed them for each micro-batch. An evaluation always counts as epoch 0.

    A dataset may define `get_sample(index, seed)`, which is then called in place of `__getitem__`, to seed another
    generator:

        def get_sample(self, index, seed):
            generator = torch.Generator().manual_seed(seed)
            return self.images[index] + 0.1 * torch.randn(self.shape, generator=generator), self.labels[index]

    `validation` and `test` may also be several datasets by name, with metrics `validation/<name>/loss`. For training,
    `Mixture` and `Sequential` combine several datasets, and `Packed` makes rows of short sequences. `lengths`, one
    number for each sample, groups samples of similar length into global batches.

    With `sample_weights`, one number for each training sample, an epoch of n samples is n draws with replacement in
    proportion to the weights. `balance_classes` draws all classes equally often. It is the class of each sample, or
    `True` for a dataset with `targets` or `labels`, or a `TensorDataset` whose last tensor is one integer for each
    sample. The draws are a function of the seed, the epoch and the position, like any other order.
    """

    @named_arguments
    def __init__(
        self,
        *,
        train: Any = None,
        validation: Any = None,
        test: Any = None,
        predict: Any = None,
        batch_size: Annotated[int, Ge(1), Unit("samples")] | None = None,
        evaluation_batch_size: Annotated[int, Ge(1), Unit("samples")] | None = None,
        shuffle: bool = True,
        drop_last: bool = False,
        collate_fn: Collate | None = None,
        num_workers: Annotated[int, Ge(0), "0 reads in the training process"] = 0,
        persistent_workers: bool = True,
        pin_memory: bool = True,
        lengths: Sequence[int] | None = None,
        sample_weights: Sequence[float] | Tensor | None = None,
        balance_classes: bool | Sequence[Any] | Tensor = False,
        seed: int | None = None,
        seed_samples: bool = True,
    ) -> None:
        check_arguments(Data.__init__, locals())
        if sample_weights is not None and balance_classes is not False:
            raise UserError(
                "sample_weights and balance_classes both set how often a sample is drawn; give one of them."
            )
        self.batch_size = batch_size
        self.evaluation_batch_size = evaluation_batch_size
        self.shuffle = shuffle
        self.drop_last = drop_last
        self.collate_fn = collate_fn
        self.num_workers = num_workers
        self.persistent_workers = persistent_workers
        self.pin_memory = pin_memory
        self.lengths = lengths
        self.sample_weights = None if sample_weights is None else check_sample_weights(sample_weights)
        self.balance_classes = balance_classes
        self.seed = seed
        self.seed_samples = seed_samples
        self._class_weights: Tensor | None = None  # computed when training data is first read
        self._datasets = {"train": train, "validation": validation, "test": test, "predict": predict}

    def dataset(self, stage: str) -> Any:
        """Return the dataset or loader of a stage; override to make it only when it is needed."""
        return self._datasets[stage]

    def has(self, stage: str) -> bool:
        """Return True if there is a dataset for `stage`."""
        return self.dataset(stage) is not None

    def unused_sampler_seed(self) -> int | None:
        """Return the seed of the training data's DistributedSampler, which the strategy's sampler replaces."""
        loader = self.dataset("train")
        sampler = loader.sampler if isinstance(loader, DataLoader) else None
        return sampler.seed if isinstance(sampler, DistributedSampler) and sampler.shuffle else None

    def stage_data(self, stage: str) -> StageData:
        """Return the data of `stage`, the first of several datasets; raises UserError if it cannot be read."""
        return next(iter(self.stage_data_by_name(stage).values()))

    def stage_data_by_name(self, stage: str) -> dict[str, StageData]:
        """Return the data of `stage` by dataset name, `""` for a single one; raises UserError if it cannot be read."""
        dataset = self.dataset(stage)
        if dataset is None:
            raise UserError(f"there is no {stage} data; pass Data({stage}=dataset).")
        # A list of samples is a map-style dataset itself, so only a list of datasets is refused.
        if isinstance(dataset, (list, tuple)) and any(isinstance(item, (DataLoader, Dataset)) for item in dataset):
            raise UserError(
                f"the {stage} data is a {type(dataset).__name__} of datasets; pass one dataset, or for an evaluation "
                f"several by name: Data({stage}={{'easy': first, 'hard': second}})."
            )
        # Not a subclass of dict, which may be a dataset itself.
        if type(dataset) is not dict:
            return {"": self._stage_data(stage, dataset)}
        _check_names(stage, dataset)
        return {name: self._stage_data(stage, item) for name, item in dataset.items()}

    def _stage_data(self, stage: str, dataset: Any) -> StageData:
        is_train = stage == "train"
        source: Data | DataLoader[Any] = self
        start: StartWorker = start_worker
        shuffle, drop_last, sampler, size, is_pre_batched = self.shuffle, self.drop_last, None, None, False
        if isinstance(dataset, DataLoader):
            _check_loader(stage, dataset)
            # With the loader's dataset: a `worker_init_fn` expects it in `get_worker_info`, where the reader's would
            # be.
            start = partial(start_worker, dataset=dataset.dataset, worker_init_fn=dataset.worker_init_fn)
            source, dataset = dataset, as_iterable(stage, dataset.dataset)
            is_iterable = isinstance(dataset, IterableDataset)
            # torch gives an iterable dataset a sampler without a meaning, whose order must not be taken for a wish.
            sampling = source if is_iterable else _sampling_of(stage, source)
            shuffle = _shuffles(sampling.sampler)
            sampler = None if is_iterable else _custom_sampler(stage, sampling.sampler)
            drop_last, size = sampling.drop_last, sampling.batch_size
            is_pre_batched = size is None
            self._check_pre_batched(stage, is_pre_batched=is_pre_batched)
        check_undivided(stage, dataset)
        dataset = as_iterable(stage, dataset)
        stage_data = StageData(
            stage,
            dataset,
            batch_size=None if is_pre_batched else self._batch_size(stage, size),
            collate_fn=source.collate_fn or default_collate,
            num_workers=source.num_workers,
            shuffle=shuffle and is_train,
            drop_last=drop_last and is_train,
            pin_memory=source.pin_memory,
            sampler=sampler,
            persistent_workers=self.persistent_workers,
            seed_samples=self.seed_samples,
            start_worker=start,
            # Lengths and weights have one number for each sample of the training data; evaluations read each sample
            # once.
            lengths=self.lengths if is_train else None,
            sample_weights=self._weights_of(dataset) if is_train else None,
        )
        _check(stage_data, is_pre_batched=is_pre_batched)
        return stage_data

    def _check_pre_batched(self, stage: str, *, is_pre_batched: bool) -> None:
        """Raise UserError if the items of a loader are global batches, and `batch_size` takes them for samples."""
        if is_pre_batched and stage == "train" and self.batch_size is not None:
            raise UserError(
                "the train DataLoader has batch_size=None, so its items are global batches, but Data has "
                f"batch_size={self.batch_size}; omit Data(batch_size=...), or, if the items are single samples, pass "
                "the dataset itself: Data(train=loader.dataset, batch_size=...)."
            )

    def _weights_of(self, dataset: Any) -> Tensor | None:
        if self.balance_classes is False:
            return self.sample_weights
        # Once, as labels may have to be read from the whole dataset, and this method is called for every check.
        if self._class_weights is None:
            labels = labels_of(dataset) if isinstance(self.balance_classes, bool) else self.balance_classes
            self._class_weights = balanced_weights(labels)
        return self._class_weights

    def _batch_size(self, stage: str, of_loader: int | None) -> int | None:
        if stage != "train" and self.evaluation_batch_size is not None:
            return self.evaluation_batch_size
        # In evaluations the loader's size counts, as `batch_size` is that of an optimizer step.
        return of_loader if self.batch_size is None or (of_loader and stage != "train") else self.batch_size


def _check_loader(stage: str, loader: DataLoader[Any]) -> None:
    """Raise UserError if reading a loader's dataset would drop what it does to batches, or where it stands in them."""
    name = type(loader).__name__
    # `_get_iterator` is private, and what a subclass overrides to change batches. The Trainer would call neither.
    if not {_defining_module(loader, method) for method in ("__iter__", "_get_iterator")} <= {*_LOADERS}:
        raise UserError(
            f"the {stage} data is a {name}, which makes its batches in an __iter__ of its own; the Trainer reads the "
            "dataset of a DataLoader itself. Put what it does to batches into its collate_fn."
        )
    # Private, as torchdata has no public way to tell that an epoch has begun, or that a state was loaded.
    iterator: Any = loader._iterator if hasattr(loader, "load_state_dict") else None
    sampler = getattr(loader.batch_sampler, "sampler", loader.sampler)
    is_loaded = (
        getattr(loader, "next_iter_state", None) is not None or getattr(sampler, "next_yielded", None) is not None
    )
    if is_loaded or (iterator is not None and iterator._num_yielded and not getattr(iterator, "_finished", False)):
        where = "has a state that was loaded (load_state_dict)" if is_loaded else "was left within an epoch"
        raise UserError(
            f"the {stage} data is a {name} that {where}, but the Trainer reads its dataset from the beginning, in an "
            "order of its own. Pass a new one; Trainer.fit(..., resume=run_dir) continues a run at its exact sample."
        )


def _defining_module(loader: DataLoader[Any], method: str) -> str:
    return next(kind.__module__ for kind in type(loader).__mro__ if method in vars(kind))


def _shuffles(sampler: Any) -> bool:
    """Return True for a sampler of torch or torchdata that draws a random order."""
    if isinstance(sampler, DistributedSampler):
        return sampler.shuffle
    return _is_plain(sampler, "RandomSampler")


def _is_plain(sampler: Any, name: str) -> bool:
    """Return True for the sampler of torch or torchdata that has this name, and not for a subclass."""
    # By name, as torchdata need not be installed. A subclass may draw an order of its own.
    return type(sampler).__name__ == name and type(sampler).__module__ in _SAMPLERS


def _sampling_of(stage: str, loader: DataLoader[Any]) -> DataLoader[Any] | BatchSampler:
    """Return the holder of sampler, batch size and drop_last: the loader, or its batch sampler."""
    if loader.batch_sampler is None:
        return loader
    if not isinstance(loader.batch_sampler, BatchSampler) or not _is_plain(loader.batch_sampler, "BatchSampler"):
        raise UserError(
            f"the {stage} DataLoader has a batch_sampler of type {type(loader.batch_sampler).__name__}, which "
            "fixes who reads what; pass a sampler of single indices and a batch_size instead."
        )
    return loader.batch_sampler


def _custom_sampler(stage: str, sampler: Any) -> Sampler[int] | None:
    """Return a loader's sampler if it is custom; `None` for a torch sampler that the strategy's sampler replaces."""
    # `_num_samples` is private: the public property returns a number in any case.
    plain_random = _is_plain(sampler, "RandomSampler") and not sampler.replacement and sampler._num_samples is None
    if plain_random or isinstance(sampler, SequentialSampler | DistributedSampler):
        return None
    if not isinstance(sampler, Sized):
        raise UserError(f"the {stage} DataLoader's sampler {type(sampler).__name__} needs a length (__len__).")
    return sampler  # type: ignore[return-value] # sized, and a sampler as the loader takes it


def _check_names(stage: str, datasets: dict[Any, Any]) -> None:
    """Raise UserError if the stage takes a single dataset, or a dataset has no usable name."""
    if stage in ("train", "predict"):
        remedy = "Mixture(...) or Sequential(...)" if stage == "train" else "one of them"
        raise UserError(f"the {stage} data is a dict of datasets, but must be a single dataset; pass {remedy}.")
    if not datasets:
        raise UserError(f"the {stage} data is an empty dict; pass a dataset, or several by name.")
    for name in datasets:
        if not isinstance(name, str) or not name or "/" in name:
            raise UserError(f"the {stage} dataset {name!r} needs a name for its metrics: {stage}/<name>/loss.")


def _check(data: StageData, *, is_pre_batched: bool) -> None:
    stage, size, length = data.stage, data.batch_size, data.num_items
    if data.lengths is not None and (data.is_iterable or size is None or data.sampler is not None):
        raise UserError(
            "lengths set the order of samples; they cannot be combined with an IterableDataset, a pre-batched "
            "dataset or a custom sampler."
        )
    if data.lengths is not None and len(data.lengths) != length:
        raise UserError(
            f"there are {len(data.lengths)} lengths for {length} samples of {stage} data; give one for each."
        )
    if data.sample_weights is not None:
        _check_weights(data, len(data.sample_weights))
    # Not the machine's cores: a container or SLURM may grant fewer.
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    if data.num_workers > MAX_WORKERS_PER_CORE * cores:
        raise UserError(
            f"the {stage} data has num_workers={data.num_workers}, which starts as many processes for each rank, but "
            f"this process may use {cores} core{'s' * (cores > 1)}; set num_workers={MAX_WORKERS_PER_CORE * cores} or "
            "less."
        )
    if data.is_iterable:
        if isinstance(data.dataset, StatefulIterable) and data.num_workers:
            raise UserError(
                f"the {stage} data is a {type(data.dataset.iterable).__name__} with num_workers={data.num_workers}: a "
                "worker would read a copy of it from its beginning in each epoch. Set num_workers=0; nodes of "
                "torchdata read ahead by themselves."
            )
        if data.num_workers > 1 and (size is None or num_shards_of(data.dataset) is None):
            # Two workers would each yield all samples, as only shards divide them.
            kind = "of global batches (batch_size=None)" if size is None else "without several shards"
            raise UserError(
                f"the {stage} data is an IterableDataset {kind} with num_workers={data.num_workers}: several workers "
                "would repeat it or change its order. Set num_workers=1 or 0"
                + (", or define num_shards and shard(num_shards, index)." if size is not None else ".")
            )
        if size is None and not is_pre_batched:
            raise UserError(
                f"the {stage} data is an IterableDataset of samples; set batch_size. If its items are global batches, "
                f"pass Data({stage}=DataLoader(dataset, batch_size=None))."
            )
        return
    if length is None:
        raise UserError(
            f"the {stage} data of type {type(data.dataset).__name__} has no length; define __len__ and "
            "__getitem__, or make it a torch.utils.data.IterableDataset."
        )
    if length == 0:
        raise UserError(f"the {stage} dataset is empty; check where its samples come from.")
    if size is None and isinstance(data.dataset, TensorDataset):
        raise UserError(f"the {stage} data is a TensorDataset of single samples; set batch_size.")
    if stage == "train" and size is not None and size > length:
        raise UserError(
            f"batch_size={size} is larger than the training data, which has {length} samples; "
            f"set batch_size={length} or less."
        )


def _check_weights(data: StageData, num_weights: int) -> None:
    dataset, sampler = type(data.dataset).__name__, type(data.sampler).__name__
    conflicts = {
        "an IterableDataset, which has its own order": data.is_iterable,
        "a pre-batched dataset; set batch_size and give single samples": data.batch_size is None,
        f"the sampler {sampler}, which draws the samples; remove one of them": data.sampler is not None,
        "lengths, which give each sample once an epoch; remove one of them": data.lengths is not None,
        f"{dataset}, which has its own order": callable(getattr(data.dataset, "order", None)),
        "shuffle=False: draws are random; set shuffle=True": not data.shuffle,
    }
    for conflict, applies in conflicts.items():
        if applies:
            raise UserError(f"sample_weights and balance_classes cannot be combined with {conflict}.")
    if num_weights != data.num_items:
        raise UserError(
            f"there are weights or classes of {num_weights} samples for {data.num_items} samples of "
            f"{data.stage} data; give one for each."
        )


def check_sample_weights(weights: Sequence[float] | Tensor) -> Tensor:
    """Return one float64 weight for each sample; raises UserError unless samples can be drawn by them."""
    try:
        numbers = weights if isinstance(weights, Tensor) else list(weights)
        # On the CPU, where orders are computed. In float64: the sum over millions of samples must not lose the small
        # ones.
        vector = torch.as_tensor(numbers, dtype=torch.float64, device="cpu").detach()
    except (TypeError, ValueError, RuntimeError):
        raise UserError(
            f"sample_weights must be one number for each training sample, got a {type(weights).__name__} that is not "
            "a list of numbers."
        ) from None
    if vector.dim() != 1:
        raise UserError(f"sample_weights must be one number for each training sample, got shape {tuple(vector.shape)}.")
    invalid = (~torch.isfinite(vector) | (vector < 0)).nonzero()
    if len(invalid):
        index = int(invalid[0])
        raise UserError(
            f"sample_weights must be 0 or more and finite, but that of sample {index} is {float(vector[index]):g}."
        )
    if not bool((vector > 0).any()):
        raise UserError("sample_weights must be above 0 for at least one sample, but are all 0.")
    return vector


def balanced_weights(labels: Sequence[Any] | Tensor) -> Tensor:
    """Return 1 / (samples of its class) for each sample, as float64."""
    if isinstance(labels, Tensor):
        if labels.dim() != 1 or labels.is_floating_point():
            raise UserError(
                "balance_classes must be one class for each sample, a list or a tensor of whole numbers; got shape "
                f"{tuple(labels.shape)} of {labels.dtype}."
            )
        labels = labels.tolist()
    # Tensors hash by identity: as keys each would be a class of its own.
    classes = [label.item() if isinstance(label, Tensor) else label for label in labels]
    counts = Counter(classes)
    return torch.tensor([1 / counts[label] for label in classes], dtype=torch.float64)


def labels_of(dataset: Any) -> Sequence[Any] | Tensor:
    """Return the class of each sample, if the dataset defines them; raises UserError if it does not."""
    labels = _known_labels(dataset)
    if labels is None:
        raise UserError(
            f"balance_classes=true needs the class of each sample, which {type(dataset).__name__} does not define; "
            "give it an attribute `targets` or `labels`, or pass Data(balance_classes=[class of each sample])."
        )
    return labels


def _known_labels(dataset: Any) -> Sequence[Any] | Tensor | None:
    # Not for a subclass, which may make its samples of other tensors.
    if type(dataset) is TensorDataset:
        label_column = dataset.tensors[-1]
        return label_column if label_column.dim() == 1 and not label_column.is_floating_point() else None
    if type(dataset) is Subset:
        labels = _known_labels(dataset.dataset)
        return None if labels is None else [labels[int(index)] for index in dataset.indices]
    return getattr(dataset, "targets", getattr(dataset, "labels", None))
