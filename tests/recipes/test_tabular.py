"""CSV tables: standardized over the training rows, with mistakes reported by line."""

import pytest
import torch
from trainkit.recipes.tabular import TableData, TabularTask

from trainkit.errors import UserError


def _table(tmp_path, text):
    path = tmp_path / "plants.csv"
    path.write_text(text)
    return TableData(csv=str(path))


def test_columns_are_standardized_over_the_training_rows(tmp_path):
    lines = [f"{row},{row % 3},5,{'rose' if row % 2 else 'lily'}" for row in range(20)]
    data = _table(tmp_path, "\n".join(["length,width,same,kind", *lines]))
    rows, classes = data.dataset("train").tensors
    assert rows.shape == (16, 3) and len(data.dataset("validation")) == 4
    assert torch.allclose(rows.mean(dim=0), torch.zeros(3), atol=1e-6)
    assert torch.allclose(rows.std(dim=0), torch.tensor([1.0, 1.0, 0.0]), atol=1e-5)
    both = torch.cat([classes, data.dataset("validation").tensors[1]])
    assert both.bincount().tolist() == [10, 10]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a,b,kind\n1,2,x\n1,two,y\n", r"plants\.csv:3: could not convert .*two"),
        ("a,b,kind\n1,2,x\n1,y\n", r"plants\.csv:3: 2 values, but there are 3 names"),
        ("a,b,kind\n1,2,x\n\n2,3,y\n", r"plants\.csv:3: 0 values"),
        ("a,b,kind\n", "needs a line of names"),
        ("kind\nx\ny\n", "needs a line of names"),
    ],
)
def test_a_mistake_in_a_file_is_reported_with_its_line(text, message, tmp_path):
    with pytest.raises(UserError, match=message):
        _table(tmp_path, text).dataset("train")


def test_a_missing_file_is_rejected_with_the_nearest_name(tmp_path):
    (tmp_path / "plants.csv").touch()
    with pytest.raises(UserError, match=r"plant\.csv is not a file.*plants\.csv"):
        TableData(csv=str(tmp_path / "plant.csv")).dataset("train")


def test_a_wrong_number_of_columns_is_rejected_with_the_setting():
    with pytest.raises(UserError, match=r"set task\.columns=4"):
        TabularTask(columns=3)(torch.zeros(2, 4))
