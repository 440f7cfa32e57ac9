"""The distance of two sets of points, taken for normal distributions."""

import pytest
import torch
from trainkit.recipes.gan import FrechetDistance


def _distance(true, false, *, parts=1):
    metric = FrechetDistance(true.shape[1])
    for some_true, some_false in zip(true.chunk(parts), false.chunk(parts), strict=True):
        metric.update(some_true, some_false)
    return metric.compute().item()


@pytest.fixture
def points():
    return torch.randn(400, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


def test_the_distance_of_equal_sets_is_zero_in_any_order(points):
    assert _distance(points, points.flip(0), parts=5) == pytest.approx(0, abs=1e-6)


def test_the_distance_of_shifted_points_is_the_squared_shift(points):
    assert _distance(points, points + torch.tensor([3.0, 0.0, 4.0])) == pytest.approx(25, abs=1e-5)


def test_the_distance_of_scaled_points_is_the_squared_difference_of_their_deviations(points):
    centred = points - points.mean(dim=0)
    variance = centred.square().mean(dim=0).sum().item()
    assert _distance(centred, 3 * centred) == pytest.approx(4 * variance, rel=1e-6)  # (3 - 1)² times each variance
