"""The norm of large flat buffers."""

import pytest
import torch
from trainkit.strategies.reducer.grad_norm import total_norm

CPU = torch.device("cpu")


def test_the_norm_of_a_large_flat_buffer_is_accurate_where_torchs_own_is_not():
    flat = torch.rand(20_000_000, generator=torch.Generator().manual_seed(0)) + 0.5
    exact = flat.double().norm().item()
    assert abs(total_norm([flat], CPU).item() / exact - 1) < 1e-6


def test_several_tensors_have_one_norm():
    tensors = [torch.full((3, 3), 2.0), torch.tensor([]), torch.tensor([1.0]).bfloat16()]
    assert total_norm(tensors, CPU).item() == pytest.approx(37**0.5)


def test_sparse_and_complex_tensors_count_as_their_elements():
    sparse = torch.sparse_coo_tensor([[0, 0]], [3.0, 1.0], (5,), check_invariants=True)  # the same element twice: 4
    assert total_norm([sparse, torch.tensor([3 + 0j])], CPU).item() == pytest.approx(5.0)


def test_the_norm_of_no_gradients_is_zero():
    assert total_norm([], CPU).item() == 0.0
