"""Reading, downsampling and formatting of logged metrics."""

import json
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.report.parsed import Page
from trainkit.console import seconds, size
from trainkit.report.charts import Series, chart, curve_charts
from trainkit.report.html import number, share, short, ticks
from trainkit.report.record import Curve, averaged, base_names, downsample, read_curves


def test_values_of_a_resumed_run_replace_those_of_the_same_steps(tmp_path):
    lines = [{"step": step, "train/loss": value} for step, value in ((2, 1.0), (4, 2.0), (6, 3.0), (4, 9.0), (6, 8.0))]
    text = "\n".join(json.dumps(line) for line in lines)
    (tmp_path / "metrics.jsonl").write_text(f'{text}\nnot json\n[1]\n{{"step": "x"}}\n{{"step": 8, "train/lo')
    assert read_curves(tmp_path) == {"train/loss": Curve([2, 4, 6], [1.0, 9.0, 8.0])}


def test_nan_and_infinity_are_read_from_strings(tmp_path):
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "time": 5, "a": "NaN", "b": "-Infinity", "c": true}\n')
    curves = read_curves(tmp_path)
    assert math.isnan(curves["a"].values[-1]) and curves["b"].values[-1] == -math.inf
    assert set(curves) == {"a", "b"}


@given(st.lists(st.floats(allow_infinity=False), min_size=1, max_size=400), st.integers(8, 64))
def test_downsampling_keeps_ends_extremes_and_nan(values, most):
    curve = Curve(list(range(len(values))), values)
    thin = downsample(curve, most=most)
    assert len(thin.steps) <= max(most + 2, 8)
    assert thin.steps == sorted(set(thin.steps))
    assert (thin.steps[0], thin.steps[-1]) == (0, len(values) - 1)
    assert all(values[step] is value for step, value in zip(thin.steps, thin.values, strict=True))
    finite = [value for value in values if math.isfinite(value)]
    if finite:
        kept = [value for value in thin.values if math.isfinite(value)]
        assert (min(kept), max(kept)) == (min(finite), max(finite))
    assert any(map(math.isnan, thin.values)) == any(map(math.isnan, values))


def test_interval_means_skip_values_that_are_not_finite():
    curve = Curve(list(range(8)), [1.0, 3.0, math.nan, 5.0, 1.0, 1.0, math.inf, 1.0])
    assert averaged(curve, most=2) == Curve([1, 5], [3.0, 1.0])
    assert averaged(curve, most=3) is None  # too few points to need one


def test_stages_of_a_metric_and_parameter_groups_share_a_chart():
    names = ["train/loss", "validation/loss", "train/learning_rate.0", "train/learning_rate.1", "other/x"]
    assert base_names(names) == {
        "loss": names[:2],
        "learning_rate": names[2:4],
        "other/x": ["other/x"],
    }


def test_a_chart_without_a_finite_value_says_so_and_escapes_its_names():
    drawn = Page(chart("a < b", [Series("<c>", Curve([1, 2], [math.nan, math.inf]))]))
    assert drawn.open == []
    assert "a < b" in drawn.text and "<c>: no finite value" in drawn.text


@pytest.mark.parametrize(
    ("shown", "text"),
    [
        (number(12345.0), "12,345"),
        (number(0.0123456), "0.01235"),
        (number(math.nan), "NaN"),
        (number(28_702_373_189.2), "28.7G"),
        (short(12_500), "12.5k"),
        (size(5 * 2**20), "5.0 MiB"),
        (seconds(0.00042), "420 µs"),
        (seconds(3723), "1:02:03"),
        (share(0.1234), "12.3 %"),
        (ticks(0.0, 1.0, count=4), [0.0, 0.25, 0.5, 0.75, 1.0]),
    ],
)
def test_numbers_are_rounded_and_have_units(shown, text):
    assert shown == text


def test_a_value_of_training_is_drawn_at_the_middle_of_its_steps_and_others_at_their_own():
    curve = Curve([1, 50, 100, 120], [4.0, 3.0, 2.0, 1.0])
    names = ("train/loss", "validation/loss", "train/learning_rate", "train/samples_per_second")
    charts = curve_charts({"": dict.fromkeys(names, curve)}, kinds=("learning", "optimization", "speed"))
    pictures = [json.loads(script) for html in charts for script in Page(html).scripts if script.startswith("{")]
    drawn = {(series["name"], *series["x"]) for picture in pictures for series in picture["series"]}
    assert ("train", 1, 26, 75, 110) in drawn and ("validation", 1, 50, 100, 120) in drawn
    assert ("train", 1, 50, 100, 120) in drawn  # the learning rate, and the speed


def test_the_axis_of_memory_begins_at_0():
    curve = Curve([1, 2, 3], [500.0, 501.0, 502.0])
    (memory,) = curve_charts({"": {"host/memory_mib": curve}}, kinds=("memory",))
    (loss,) = curve_charts({"": {"validation/loss": curve}}, kinds=("learning",))
    assert ">0<" in memory and ">0<" not in loss
