"""Traversal, rows and devices of nested batches."""

from collections import OrderedDict, UserDict, namedtuple
from dataclasses import dataclass

import pytest
import torch

from trainkit import UserError
from trainkit.tree import concatenate, map_tensors, num_rows, rows, tensors_in, to_device, tree_leaves, tree_map

Pair = namedtuple("Pair", "left right")


@dataclass
class Graph:
    nodes: torch.Tensor
    name: str


def double(batch):
    return map_tensors(batch, lambda tensor: tensor * 2)


def test_containers_keep_their_kind_and_other_values():
    one = torch.ones(2)
    batch = [
        one,
        (one, "text"),
        {"a": one, "b": None},
        Pair(one, 3),
        Graph(one, "g"),
        OrderedDict(x=one),
        UserDict(y=one),
    ]
    doubled = double(batch)
    assert [type(item) for item in doubled] == [type(item) for item in batch]
    assert sum(tensor.sum() for tensor in tensors_in(doubled[:5])) == 5 * 4
    assert doubled[1][1] == "text"
    assert doubled[2]["b"] is None
    assert doubled[3].right == 3
    assert doubled[4].name == "g"
    assert doubled[6]["y"].tolist() == [2.0, 2.0]
    assert one.tolist() == [1.0, 1.0]


def test_leaves_are_visited_in_order_and_a_node_may_be_a_leaf():
    tree = {"a": [1, (2, None)], "b": UserDict(c="text"), "d": Graph(3, "g")}
    assert list(tree_leaves(tree)) == [1, 2, None, "text", 3, "g"]
    seen = []
    tree_map(seen.append, tree, is_leaf=lambda node: isinstance(node, list))
    assert seen == [[1, (2, None)], "text", 3, "g"]


def test_the_number_of_rows_is_the_first_dimension_of_the_first_tensor_that_has_one():
    assert num_rows({"scale": torch.tensor(2.0), "x": torch.ones(5, 3), "y": torch.ones(7)}) == 5
    assert num_rows([torch.ones(4)]) == 4
    assert num_rows(Graph(torch.ones(6), "g")) == 6


@pytest.mark.parametrize("batch", ["text", [1, 2], {}, torch.tensor(3.0)])
def test_a_batch_without_rows_is_refused(batch):
    with pytest.raises(UserError, match=f"pre-batched batch of type {type(batch).__name__}.*a batch_size instead"):
        num_rows(batch)


def test_rows_are_selected_in_tensors_that_have_so_many():
    batch = (torch.arange(6), torch.arange(4), torch.tensor(1), "text")
    selected = rows(batch, slice(1, None, 2), of=6)
    assert selected[0].tolist() == [1, 3, 5]
    assert selected[1:] == batch[1:]


def test_only_floating_point_tensors_get_the_type():
    batch = to_device(
        {"x": torch.ones(2), "label": torch.tensor([1]), "mask": torch.tensor([True])},
        torch.device("cpu"),
        dtype=torch.float64,
    )
    assert [tensor.dtype for tensor in batch.values()] == [torch.float64, torch.int64, torch.bool]


def test_a_custom_batch_type_moves_itself():
    class Moves:
        moved = None

        def to(self, device):
            self.moved = device
            return self

    batch = Moves()
    assert to_device(batch, torch.device("cpu")) is batch
    assert batch.moved == torch.device("cpu")


def test_predictions_are_joined_by_kind():
    first, second = torch.ones(2, 3), torch.zeros(1, 3)
    assert concatenate([first, second]).shape == (3, 3)
    assert concatenate([{"a": first}, {"a": second}])["a"].shape == (3, 3)
    assert concatenate([(first, [1, 2]), (second, [3])])[1] == [1, 2, 3]
    assert concatenate(["a", "b"]) == ["a", "b"]
