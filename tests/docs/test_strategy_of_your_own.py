"""The strategy of docs/extending.md trains to the weights of one device."""

import importlib

import pytest

from tests.docs.test_code_blocks import ROOT, blocks_of
from tests.tasks import Regression, regression_data
from trainkit import Data, UserError
from trainkit.parity.compare import compare_strategies


def test_the_strategy_of_the_docs_is_equal_to_single_in_at_most_40_lines(tmp_path, monkeypatch):
    code = next(block.code for block in blocks_of(ROOT / "docs/extending.md") if "class FlatAllReduce" in block.code)
    assert len(code.splitlines()) <= 40
    (tmp_path / "flat_all_reduce.py").write_text(code, encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)  # ranks import it by name
    made = importlib.import_module("flat_all_reduce").FlatAllReduce(devices=2, device="cpu", accumulate=2)
    report = compare_strategies(Regression(), Data(train=regression_data(20), batch_size=8), [made], steps=4)
    assert [row.verdict for row in report.rows] == ["reference", "equal"], report.as_table()


def test_a_wrong_setting_of_the_strategy_of_the_docs_is_refused():
    blocks = [block.code for block in blocks_of(ROOT / "docs/extending.md") if "FlatAllReduce" in block.code]
    namespace = {"__name__": "__main__"}
    exec("\n".join(blocks), namespace)
    for name, value in (("piece_mb", 0), ("timeout_seconds", -1)):
        with pytest.raises(UserError, match=f"{name} must be a number of .* above 0, got {value}"):
            namespace["InPieces"](**{name: value})
