from __future__ import annotations

import io

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from trainkit import UserError
from trainkit.loggers.media import histogram_of, png, to_uint8_image


@given(st.lists(st.floats(width=32), max_size=40))
def test_every_finite_element_is_counted_once_between_the_edges(values: list[float]) -> None:
    tensor = torch.tensor(values, dtype=torch.float32)
    finite = tensor[torch.isfinite(tensor)]

    histogram = histogram_of(tensor, bins=7)

    assert histogram.num_elements == finite.numel()
    assert histogram.num_nonfinite == tensor.numel() - finite.numel()
    assert list(histogram.edges) == sorted(histogram.edges)
    if finite.numel():
        assert histogram.edges[0] <= float(finite.min())
        assert float(finite.max()) <= histogram.edges[-1]


def test_counts_are_those_of_equal_intervals() -> None:
    histogram = histogram_of(torch.tensor([0.0, 0.1, 0.9, 1.0, 2.0]), bins=2)

    assert histogram.edges == (0.0, 1.0, 2.0)
    assert histogram.counts == (3, 2)
    assert histogram.total == pytest.approx(4.0)


@pytest.mark.parametrize("shape", [(4, 5), (1, 4, 5), (3, 4, 5)])
def test_an_image_of_any_usual_shape_becomes_a_png_that_others_read(shape: tuple[int, ...]) -> None:
    image_module = pytest.importorskip("PIL.Image")
    values = torch.rand(shape)

    picture = to_uint8_image(values)
    read = image_module.open(io.BytesIO(png(picture)))

    assert read.size == (5, 4)
    assert list(read.tobytes()) == picture.flatten().tolist()
    assert torch.allclose(picture.permute(2, 0, 1).float() / 255, values.expand(3, 4, 5), atol=1 / 255)


def test_a_tensor_that_is_not_an_image_is_refused_with_its_shape() -> None:
    with pytest.raises(UserError, match=r"got \(2, 4, 5\)"):
        to_uint8_image(torch.zeros(2, 4, 5))
