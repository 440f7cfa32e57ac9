"""Files: the rows of JSONL and parquet files, as an iterable dataset with one shard for each file."""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from copy import copy
from glob import glob
from importlib import import_module
from itertools import islice
from pathlib import Path
from typing import Annotated, Any, BinaryIO

import torch
from annotated_types import Ge, Unit
from torch.utils.data import IterableDataset

from trainkit.data.order import sample_seed
from trainkit.errors import UserError
from trainkit.settings import check_arguments
from trainkit.storage import check_url, file_system, is_url, store_errors

JSONL_ENDINGS = (".jsonl", ".ndjson", ".jsonl.gz", ".ndjson.gz")
_READ_ROWS = 1024  # of a parquet file at a time


class Files(IterableDataset[dict[str, Any]]):
    """Rows of JSONL or parquet files as dictionaries, in the order of the files; each file is a shard.

    The Trainer reads one row of each file in turn, and each file once over all ranks and workers where the number of
    files and the batch size are multiples of the ranks. Files should have about the same number of rows. A resume
    continues at the exact row. The rows are counted when training begins: a parquet file states their number, a JSONL
    file is read.

    With `shuffle_buffer`, every epoch has another order, which follows from `seed` and the epoch alone: that of the
    files, and in each file that of the rows within blocks of `shuffle_buffer` rows.

    Args:
        paths: Files, or a pattern such as `data/*.parquet`, whose files are sorted by name. Names end with `.parquet`
            (which needs pyarrow), `.jsonl` or `.ndjson`, the latter two also with `.gz`. URLs such as
            `s3://bucket/part-*.jsonl` are read through fsspec.
        columns: The columns that are read; by default all.
        shuffle_buffer: Rows of a file that are read together and shuffled; 0 keeps the order of the files.
        seed: Of the shuffled orders.

    """

    def __init__(
        self,
        paths: str | Path | Sequence[str | Path],
        *,
        columns: Sequence[str] | None = None,
        shuffle_buffer: Annotated[int, Ge(0), Unit("rows")] = 0,
        seed: int = 0,
    ) -> None:
        check_arguments(Files.__init__, locals())
        pattern = isinstance(paths, (str, Path))
        files = _matching(paths) if isinstance(paths, (str, Path)) else [str(path) for path in paths]
        if not files:
            raise UserError(f"Files: no file matches {str(paths)!r}." if pattern else "Files: there are no paths.")
        for path in files:
            if is_url(path):
                file_system(path)  # refuses an unknown scheme
            if not path.endswith((".parquet", *JSONL_ENDINGS)):
                raise UserError(f"Files: {path} ends with none of .parquet, {', '.join(JSONL_ENDINGS)}.")
        if any(path.endswith(".parquet") for path in files):
            _pyarrow_parquet()
        self.paths = files
        self.columns = None if columns is None else list(columns)
        self.shuffle_buffer = shuffle_buffer
        self.seed = seed
        self._epoch = 0
        self._selected = list(range(len(files)))  # files of this shard
        self._lengths: dict[int, int] = {}  # rows of the files counted so far; the same object in all shards
        self._start = self._position = 0

    @property
    def num_shards(self) -> int:
        """The number of files."""
        return len(self._selected)

    def shard(self, num_shards: int, index: int) -> Files:
        """Return every `num_shards`-th file from file `index` on, in the order of the epoch."""
        # Shallow: shards share the table of lengths, so that no file is counted twice.
        shard = copy(self)
        shard._selected = self._order()[index::num_shards]
        shard._start = shard._position = 0
        return shard

    def __len__(self) -> int:
        return sum(map(self._length, self._selected))

    def __iter__(self) -> Iterator[dict[str, Any]]:
        # A loaded position counts for one iteration; the next epoch begins at the first row.
        self._position, self._start = self._start, 0
        skipped = self._position
        for number in self._order():
            # Files before the position are not opened if their length is known.
            if skipped and skipped >= self._length(number):
                skipped -= self._length(number)
                continue
            for row in self._rows(number, skipped):
                self._position += 1
                yield row
            skipped = 0

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch, from which the shuffled order follows."""
        self._epoch = epoch

    def state_dict(self) -> dict[str, Any]:
        """Return the number of rows that were read in this epoch."""
        return {"position": self._position}

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        """Begin the next iteration at a position."""
        self._start = self._position = saved["position"]

    def _order(self) -> list[int]:
        """Return the files in the order of the epoch."""
        if not self.shuffle_buffer or len(self._selected) == 1:
            return self._selected
        return [self._selected[index] for index in _permutation(len(self._selected), self.seed, self._epoch)]

    def _length(self, number: int) -> int:
        if number not in self._lengths:
            path = self.paths[number]
            if path.endswith(".parquet"):
                with _opened(path) as file:
                    self._lengths[number] = _pyarrow_parquet().read_metadata(file).num_rows
            else:
                self._lengths[number] = sum(1 for _ in _lines(path))
        return self._lengths[number]

    def _rows(self, number: int, first: int) -> Iterator[dict[str, Any]]:
        """Yield the rows of a file, from the row at position `first` of its order on."""
        path, size = self.paths[number], self.shuffle_buffer
        read = self._parquet_rows if path.endswith(".parquet") else self._jsonl_rows
        if not size:
            yield from read(path, first)
            return
        # From the beginning of a block on, since a block is shuffled as a whole: a resume must have the same order.
        rows, seed = iter(read(path, first - first % size)), sample_seed(self.seed, self._epoch, number)
        for block in range(first // size, -(-self._length(number) // size)):
            held = list(islice(rows, size))
            order = _permutation(len(held), seed, block)
            yield from (held[index] for index in order[max(first - block * size, 0) :])

    def _jsonl_rows(self, path: str, first: int) -> Iterable[dict[str, Any]]:
        for number, line in islice(enumerate(_lines(path)), first, None):
            try:
                row = json.loads(line)
                yield row if self.columns is None else {name: row[name] for name in self.columns}
            except (ValueError, KeyError, TypeError) as error:
                raise UserError(
                    f"Files: row {number} of {path} is not a JSON object"
                    f"{'' if self.columns is None else f' with the columns {self.columns}'}: {error!r}."
                ) from None

    def _parquet_rows(self, path: str, first: int) -> Iterable[dict[str, Any]]:
        with _opened(path) as content, _pyarrow_parquet().ParquetFile(content) as file:
            group = 0
            # Row groups before the position are not decoded.
            while group < file.num_row_groups and first >= file.metadata.row_group(group).num_rows:
                first -= file.metadata.row_group(group).num_rows
                group += 1
            groups = range(group, file.num_row_groups)
            for batch in file.iter_batches(batch_size=_READ_ROWS, row_groups=groups, columns=self.columns):
                yield from batch.slice(first).to_pylist()
                first = max(first - batch.num_rows, 0)


def _permutation(count: int, seed: int, number: int) -> list[int]:
    # A separate generator, so that the run's random numbers do not depend on how files are read.
    generator = torch.Generator().manual_seed(sample_seed(seed, number, count))
    order: list[int] = torch.randperm(count, generator=generator).tolist()
    return order


def _lines(path: str) -> Iterator[bytes]:
    """Yield the lines of a file that are not blank."""
    with _opened(path) as content, gzip.open(content) if path.endswith(".gz") else nullcontext(content) as file:
        yield from (line for line in file if not line.isspace())


def _matching(pattern: str | Path) -> list[str]:
    """Return the files that match a pattern, sorted by name; those of a store as URLs."""
    if not is_url(pattern):
        # Sorted, as file systems list in different orders, and all ranks need the same one.
        return sorted(glob(str(pattern), recursive=True))
    fs, path = file_system(check_url(pattern))
    with store_errors(f"Files: {pattern} cannot be listed"):
        return sorted(str(fs.unstrip_protocol(file)) for file in fs.glob(path))


@contextmanager
def _opened(path: str) -> Iterator[BinaryIO]:
    """Open a file, local or in a store, for reading; the connection is that of this process."""
    if not is_url(path):
        with open(path, "rb") as file:
            yield file
        return
    # Opened by the process that reads: connections of a store do not survive a fork.
    fs, inside = file_system(path)
    with fs.open(inside, "rb") as file:
        yield file


def _pyarrow_parquet() -> Any:
    try:
        return import_module("pyarrow.parquet")
    except ImportError:
        raise UserError("parquet files need pyarrow: pip install 'trainkit-torch[parquet]'.") from None
