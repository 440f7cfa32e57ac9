"""Rows of JSONL and parquet files."""

import gzip
import json
import sys

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.data.test_dataset_shards import ThreadRanks, in_turn, joined, opened
from trainkit import Data, Files, UserError
from trainkit.data import files


def write(folder, lengths, ending):
    """Write a file for each length, with rows {"x": 1000 * file + row, "y": ...}."""
    for number, length in enumerate(lengths):
        rows = [{"x": 1000 * number + row, "y": str(row)} for row in range(length)]
        path = folder / f"{number:02}{ending}"
        if ending == ".parquet":
            pyarrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
            columns = {"x": pyarrow.array([row["x"] for row in rows], pyarrow.int64()), "y": [row["y"] for row in rows]}
            parquet.write_table(pyarrow.table(columns), path, row_group_size=3)
            continue
        text = "".join(json.dumps(row) + "\n\n" for row in rows).rstrip("\n")
        path.write_bytes(gzip.compress(text.encode()) if ending.endswith(".gz") else text.encode())
    return str(folder / f"*{ending}")


endings = pytest.mark.parametrize("ending", [".jsonl", ".ndjson.gz", ".parquet"])


def numbers(rows):
    return [row["x"] for row in rows]


@endings
def test_the_rows_are_those_of_the_files_in_order(tmp_path, ending, monkeypatch):
    monkeypatch.setattr(files, "_READ_ROWS", 2)
    dataset = Files(write(tmp_path, [4, 0, 7], ending))
    assert list(dataset)[5] == {"x": 2001, "y": "1"}
    assert numbers(dataset) == [0, 1, 2, 3, *range(2000, 2007)]
    assert (len(dataset), dataset.num_shards) == (11, 3)
    assert [len(dataset.shard(3, index)) for index in range(3)] == [4, 0, 7]
    assert numbers(dataset.shard(2, 0)) == [0, 1, 2, 3, *range(2000, 2007)]
    assert next(iter(Files(dataset.paths, columns=["y"]))) == {"y": "0"}


@endings
@pytest.mark.parametrize("shuffle_buffer", [0, 3])
def test_any_position_is_found_again(tmp_path, ending, shuffle_buffer):
    pattern = write(tmp_path, [4, 0, 7, 5], ending)
    dataset = Files(pattern, shuffle_buffer=shuffle_buffer)
    dataset.set_epoch(1)
    rows, whole = iter(dataset), numbers(dataset)
    for position in range(len(whole)):
        assert dataset.state_dict() == {"position": position} or position == 0
        next(rows)
        again = Files(pattern, shuffle_buffer=shuffle_buffer)
        again.set_epoch(1)
        again.load_state_dict({"position": position})
        assert numbers(again) == whole[position:]
        assert numbers(again) == whole, "the next iteration begins at the first row"


def test_a_shuffled_order_follows_from_the_seed_and_the_epoch(tmp_path):
    pattern = write(tmp_path, [9, 9, 9], ".jsonl")

    def order(seed, epoch, shard=None):
        dataset = Files(pattern, shuffle_buffer=4, seed=seed)
        dataset.set_epoch(epoch)
        return numbers(dataset if shard is None else dataset.shard(3, shard))

    orders = [order(seed, epoch) for seed in (0, 1) for epoch in (0, 1)]
    assert [sorted(one) for one in orders] == [numbers(Files(pattern))] * 4
    assert len({tuple(one) for one in orders}) == 4
    assert order(0, 1) == orders[1] == joined(order(0, 1, shard) for shard in range(3))
    assert {number % 1000 for number in orders[0][:4]} == {0, 1, 2, 3}, "a block"
    assert len({order(0, epoch)[0] // 1000 for epoch in range(9)}) == 3, "files come in another order"


@pytest.mark.slow
@given(
    lengths=st.lists(st.integers(0, 9), min_size=1, max_size=5).filter(any),
    ending=st.sampled_from([".jsonl", ".parquet"]),
    shuffle_buffer=st.sampled_from([0, 1, 3]),
    batch_size=st.integers(1, 8),
    ranks=st.lists(st.integers(1, 3), min_size=3, max_size=3),
    stops=st.lists(st.integers(1, 2), min_size=2, max_size=2),
)
@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_a_run_goes_on_twice_on_other_ranks_with_the_same_global_batches(
    tmp_path_factory, *, lengths, ending, shuffle_buffer, batch_size, ranks, stops
):
    pattern = write(tmp_path_factory.mktemp("rows"), lengths, ending)

    def read(position, saved, stop, strategy):
        loader = opened(Files(pattern, shuffle_buffer=shuffle_buffer), strategy, batch_size=batch_size)
        loader.load_state_dict(saved)
        seen = []
        for step_batch in loader.step_batches(1, position):
            seen.append(joined(micro_batch.batch["x"].tolist() for micro_batch in step_batch.micro_batches))
            position += step_batch.num_samples
            if len(seen) == stop:
                break
        return seen, position, loader.state_dict(position)

    def on_ranks(world_size, position=0, saved=(), stop=None):
        of_ranks = ThreadRanks(world_size).run(lambda strategy: read(position, dict(saved), stop, strategy))
        batches = [sorted(joined(batch)) for batch in zip(*(seen for seen, _, _ in of_ranks), strict=True)]
        return batches, *of_ranks[0][1:]

    whole = on_ranks(1)[0]
    assert sorted(joined(whole)) == sorted(in_turn(lengths))
    if not shuffle_buffer and len(lengths) > 1:
        assert joined(whole) == joined(
            sorted(in_turn(lengths)[start : start + batch_size]) for start in range(0, sum(lengths), batch_size)
        )
    first, position, saved = on_ranks(ranks[0], stop=stops[0])
    second, position, saved = on_ranks(ranks[1], position, saved, stops[1]) if position < sum(lengths) else ([], 0, {})
    third = on_ranks(ranks[2], position, saved)[0] if 0 < position < sum(lengths) else []
    assert first + second + third == whole


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"paths": "nothing/*.jsonl"}, r"no file matches 'nothing/\*.jsonl'"),
        ({"paths": []}, "there are no paths"),
        ({"paths": ["a.csv"]}, r"a.csv ends with none of .parquet, .jsonl"),
        ({"paths": ["a.jsonl"], "shuffle_buffer": -1}, "shuffle_buffer must be a whole number of rows, at least 0"),
    ],
)
def test_wrong_arguments_are_refused(arguments, message):
    with pytest.raises(UserError, match=message):
        Files(**arguments)


def test_a_row_that_is_no_object_is_named(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text('{"x": 1}\n{"x": \n')
    with pytest.raises(UserError, match=r"row 1 of .*rows.jsonl is not a JSON object: "):
        list(Files(path))
    path.write_text('{"y": 1}\n')
    with pytest.raises(UserError, match=r"row 0 of .*rows.jsonl is not a JSON object with the columns \['x'\]: "):
        list(Files(path, columns=["x"]))


def test_parquet_without_pyarrow_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "pyarrow.parquet", None)
    with pytest.raises(UserError, match=r"pip install 'trainkit-torch\[parquet\]'"):
        Files(["a.parquet"])


def test_files_are_data_whose_epochs_have_a_length(tmp_path):
    stage_data = Data(train=Files(write(tmp_path, [4, 5], ".jsonl")), batch_size=2, num_workers=2).stage_data("train")
    assert (stage_data.num_items, stage_data.num_workers) == (9, 2)


@endings
@pytest.mark.parametrize("shuffle_buffer", [0, 3])
def test_files_of_a_store_have_the_rows_and_positions_of_local_files(tmp_path, ending, shuffle_buffer):
    fsspec = pytest.importorskip("fsspec")
    pattern = write(tmp_path, [4, 0, 7, 5], ending)
    memory = fsspec.filesystem("memory")
    for path in tmp_path.iterdir():
        memory.pipe_file(f"/rows_{tmp_path.name}/{path.name}", path.read_bytes())
    local = Files(pattern, shuffle_buffer=shuffle_buffer)
    for url in (f"file://{tmp_path}/*{ending}", f"memory://rows_{tmp_path.name}/*{ending}"):
        stored = Files(url, shuffle_buffer=shuffle_buffer)
        assert [path.rpartition("/")[2] for path in stored.paths] == [path.rpartition("/")[2] for path in local.paths]
        assert all(path.startswith(url.partition(":")[0]) for path in stored.paths)
        for dataset in (local, stored):
            dataset.set_epoch(1)
        whole = list(local)
        assert list(stored) == whole
        assert len(stored) == 16
        assert list(Files(stored.paths)) == list(Files(local.paths))
        again = Files(url, shuffle_buffer=shuffle_buffer)
        again.set_epoch(1)
        again.load_state_dict({"position": 6})
        assert list(again) == whole[6:]


def test_files_of_a_store_are_refused_by_name(monkeypatch):
    pytest.importorskip("fsspec")
    with pytest.raises(UserError, match=r"the scheme 's4' is unknown\. Did you mean 's3'\?"):
        Files("s4://bucket/*.jsonl")
    with pytest.raises(UserError, match=r"the scheme 's4' is unknown"):
        Files(["s4://bucket/0.jsonl"])
    with pytest.raises(UserError, match="no file matches 'memory://nothing/"):
        Files("memory://nothing/*.jsonl")
    monkeypatch.setitem(sys.modules, "fsspec", None)
    with pytest.raises(UserError, match=r"pip install 'trainkit-torch\[remote\]'"):
        Files("s3://bucket/*.jsonl")
