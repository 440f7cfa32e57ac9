"""Tokens of texts: made once, read through memory maps, and turned back into the text they came from."""

import ctypes
import os
import pickle
import resource
from pathlib import Path

import numpy as np
import pytest
import torch
from trainkit.recipes.gpt import GPT, SIZES, TokenFiles, TokenWindows

from trainkit import Data, Trainer
from trainkit.errors import UserError
from trainkit.loops.worker import _M_MMAP_THRESHOLD, _M_TRIM_THRESHOLD
from trainkit.testing import RankFailure, run_ranks


@pytest.fixture
def texts(tmp_path: Path) -> Path:
    folder = tmp_path / "texts"
    (folder / "below").mkdir(parents=True)
    (folder / "a.txt").write_text("the cat sat on the mat, and the rat sat on the cat. " * 20)
    (folder / "below/b.txt").write_text("äöü 語 the end " * 30, encoding="utf-8")
    (folder / "picture.png").write_bytes(b"\x89PNG\0" * 20)
    (folder / "short.txt").write_text("too short")
    return folder


def _data(texts: Path, **settings: object) -> TokenFiles:
    return TokenFiles(text=str(texts), tokens=str(texts.parent / "tokens"), context=8, batch_size=4, **settings)


def _tokens(folder: Path, name: str, token_type: str = "uint16") -> np.ndarray:
    return np.fromfile(folder / f"{name}.bin", dtype=token_type)


def test_byte_tokens_of_a_folder_are_split_at_nine_tenths_of_each_file(texts):
    folder = _data(texts).prepare()
    first, second = (path.read_bytes() for path in (texts / "a.txt", texts / "below/b.txt"))
    train, validation = _tokens(folder, "train"), _tokens(folder, "validation")
    assert len(train) + len(validation) == len(first) + len(second) + 2
    cut = len(first) + 1 - (len(first) + 1) // 10
    assert bytes(train[:cut].astype(np.uint8)) == first[:cut]
    assert bytes(validation[: len(first) - cut].astype(np.uint8)) == first[cut:]
    assert validation[len(first) - cut] == validation[-1] == 256


def test_windows_overlap_by_one_and_are_pickled_without_the_file(texts):
    windows = _data(texts).dataset("train")
    assert isinstance(windows, TokenWindows)
    stored = torch.from_numpy(_tokens(windows.path.parent, "train").astype(np.int64))
    assert len(windows) == (len(stored) - 1) // 8
    for index in (0, 3, len(windows) - 1):
        assert torch.equal(windows[index], stored[8 * index : 8 * index + 9])
    assert isinstance(windows._mapped, np.memmap)
    sent = pickle.dumps(windows)
    assert len(sent) < 500
    assert torch.equal(pickle.loads(sent)[1], windows[1])


def test_bpe_tokens_decode_to_the_text(texts):
    pytest.importorskip("tokenizers")
    from tokenizers import Tokenizer

    folder = _data(texts, tokenizer="bpe", vocabulary=300).prepare()
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    text = (texts / "a.txt").read_text()
    ids = tokenizer.encode(text).ids
    assert tokenizer.decode(ids) == text and len(ids) < len(text) / 2 and max(ids) < 300
    end = tokenizer.token_to_id("<|end|>")
    of_files = [
        [*tokenizer.encode(path.read_text(encoding="utf-8")).ids, end]
        for path in (texts / "a.txt", texts / "below/b.txt")
    ]
    cuts = [len(tokens) - len(tokens) // 10 for tokens in of_files]
    expected = [token for tokens, cut in zip(of_files, cuts, strict=True) for token in tokens[:cut]]
    assert _tokens(folder, "train").tolist() == expected


def test_other_tokens_are_written_to_another_folder(texts):
    data = _data(texts)
    windows = data.dataset("train")
    first = windows[0]
    made = (windows.path.stat().st_ino, windows.path.stat().st_mtime_ns)
    other = _data(texts, max_bytes=200).prepare()
    assert other != windows.path.parent
    assert torch.equal(windows[0], first)
    assert (data.prepare() / "train.bin").samefile(windows.path)
    assert (windows.path.stat().st_ino, windows.path.stat().st_mtime_ns) == made


def test_a_missing_or_empty_text_is_rejected(tmp_path):
    with pytest.raises(UserError, match="nowhere does not exist"):
        _data(tmp_path / "nowhere").prepare()
    (tmp_path / "empty").mkdir()
    with pytest.raises(UserError, match="has no text files"):
        _data(tmp_path / "empty").prepare()
    with pytest.raises(UserError, match=r"data\.vocabulary=100"):
        _data(tmp_path, tokenizer="bpe", vocabulary=100)


def test_recomputed_blocks_have_the_same_gradients():
    torch.manual_seed(0)
    kept, again = GPT(size="tiny", context=8), GPT(size="tiny", context=8, recompute=True)
    again.load_state_dict(kept.state_dict())
    tokens = torch.randint(257, (2, 9))
    for task in (kept, again):
        task.training_step(tokens)["loss"].backward()
    for (name, parameter), other in zip(kept.named_parameters(), again.parameters(), strict=True):
        assert torch.equal(parameter.grad, other.grad), name


ROOM = 290 * 2**20  # bytes of a process beyond what it has before there is a task


def trained_in_little_room(strategy: str, folder: Path) -> int:
    """Train 21 million parameters, for which AdamW needs 325 MiB, for two steps in a process with little room."""
    SIZES["quarter of gpt2"] = (3, *SIZES["gpt2"][1:])
    for setting in (_M_MMAP_THRESHOLD, _M_TRIM_THRESHOLD):
        ctypes.CDLL(None).mallopt(setting, 65536)  # what is freed is given back at once
    with open("/proc/self/status", encoding="ascii") as status:
        taken = 1024 * int(next(line for line in status if line.startswith("VmData")).split()[1])
    resource.setrlimit(resource.RLIMIT_DATA, (taken + ROOM, resource.RLIM_INFINITY))
    os.environ["MALLOC_TRIM_THRESHOLD_"] = "65536"  # or the run would let glibc keep it
    trainer = Trainer(strategy, max_duration="2step", callbacks=[], loggers=[], run_dir=folder / strategy)
    windows = torch.randint(257, (4, 9), generator=torch.Generator().manual_seed(0))
    return trainer.fit(GPT(size="quarter of gpt2", context=8), Data(train=windows, batch_size=2)).steps


@pytest.mark.slow
def test_a_size_that_does_not_fit_into_one_process_trains_on_two_that_hold_shards(tmp_path):
    with pytest.raises(RankFailure, match=r"can't allocate memory: you tried to allocate \d+ bytes"):
        run_ranks(trained_in_little_room, 1, "single", tmp_path)
    assert run_ranks(trained_in_little_room, 2, "fsdp", tmp_path) == [2, 2]
