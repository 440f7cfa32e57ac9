"""Reports in a real browser: without an error, with values under the pointer, and small however long the run was."""

import shutil
import subprocess
from pathlib import Path

import pytest

from trainkit.profiling import Timeline, TimelineSpan, Track
from trainkit.report.comparison import comparison_report
from trainkit.report.record import read_run
from trainkit.report.run_report import write_page, write_report

CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")

pytestmark = [pytest.mark.slow, pytest.mark.skipif(CHROMIUM is None, reason="chromium is not installed")]
# Prints the number of elements and points, and the values under the pointer, into the title, which `--dump-dom` shows.
_PROBE = """
<script>
const failures = [];
addEventListener("error", (event) => failures.push(event.message));
addEventListener("load", () => {
  document.body.offsetHeight;
  const plot = document.querySelector(".plot"), box = plot.querySelector(".frame").getBoundingClientRect();
  const place = { clientX: box.left + box.width / 2, clientY: box.top + 20, bubbles: true };
  plot.dispatchEvent(new PointerEvent("pointermove", place));
  const tip = plot.querySelector(".tip");
  const wide = document.documentElement.scrollWidth > innerWidth + 1;
  const drawn = [...document.querySelectorAll("#timeline rect")].map((bar) => bar.getBoundingClientRect());
  const elements = document.querySelectorAll("*").length;
  const lines = [...document.querySelectorAll("polyline")];
  const points = lines.map((line) => line.points.numberOfItems).reduce((sum, count) => sum + count, 0);
  const bars = drawn.filter((bar) => bar.width > 5 && bar.height > 5).length;
  document.title = JSON.stringify({ elements, points, bars, tip: tip ? tip.innerText : "", failures, wide });
});
</script>
"""


def opened(path: Path, tmp_path: Path, *, width: int = 1200) -> dict:
    """Return the findings of the probe in a copy of the page."""
    import json
    import re

    copy = tmp_path / "probed.html"
    copy.write_text(path.read_text().replace("</head>", f"{_PROBE}</head>"))
    command = [CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", f"--window-size={width},900"]
    command += [f"--user-data-dir={tmp_path / 'profile'}", "--dump-dom", copy.as_uri()]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=True)
    title = re.search(r"<title>(.*?)</title>", done.stdout, re.S)
    return json.loads(title.group(1).replace("&lt;", "<").replace("&gt;", ">").replace("&amp;", "&"))


def test_a_report_of_100_000_steps_draws_few_elements_and_shows_values(long_run, tmp_path):
    found = opened(long_run / "report.html", tmp_path)
    assert found["failures"] == []
    assert found["elements"] < 2_000 and found["points"] < 50_000  # laid out at once
    assert found["tip"].startswith("step ")


def test_pages_fit_a_narrow_screen_and_show_values(finished_run, failed_run, tmp_path):
    for folder in (finished_run, failed_run):
        found = opened(folder / "report.html", tmp_path, width=500)
        assert found["failures"] == [] and not found["wide"]
        assert "loss" in found["tip"] or "train" in found["tip"]


def test_a_comparison_and_a_timeline_open_and_show_values(finished_run, failed_run, tmp_path):
    page = comparison_report([read_run(finished_run), read_run(failed_run)])
    found = opened(write_page(page, tmp_path / "both.html"), tmp_path)
    assert found["failures"] == [] and not found["wide"]
    assert "finished" in found["tip"] and "failed" in found["tip"]

    folder = tmp_path / "drawn"
    shutil.copytree(finished_run, folder)
    spans = [TimelineSpan("forward", 0.0, 0.02, label="0"), TimelineSpan("backward", 0.02, 0.06, label="0")]
    Timeline("ddp", "One step", [Track("rank 0", spans), Track("bucket 0", spans[1:])], 7).write(folder)
    for width in (1200, 500):
        found = opened(write_report(folder), tmp_path, width=width)
        assert found["failures"] == [] and not found["wide"]
        assert found["bars"] == 3
