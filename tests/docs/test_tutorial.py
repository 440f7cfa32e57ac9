"""The tutorial prints what its page says: the same weights under every strategy, on two and on three devices."""

import re
import subprocess
import sys

import pytest

from tests.docs.test_code_blocks import ROOT, blocks_of


@pytest.mark.slow
def test_the_tutorial_prints_equal_weights_as_its_page_shows_them(tmp_path):
    program, printed = (
        "\n".join(block.code for block in blocks_of(ROOT / "docs/tutorial_equal_weights.md") if block.language == kind)
        for kind in ("python", "text")
    )
    (tmp_path / "page.py").write_text(program, encoding="utf-8")
    run = subprocess.run(
        [sys.executable, "page.py"], check=True, timeout=600, cwd=tmp_path, capture_output=True, text=True
    )
    assert run.stdout == printed
    # Each of six runs prints its name and the weights after two epochs; the first three are on two devices.
    of_runs = [lines.splitlines()[1:] for lines in re.split(r"^(?=\w)", run.stdout, flags=re.MULTILINE) if lines]
    assert [len(lines) for lines in of_runs] == [2] * 6
    assert of_runs[0] == of_runs[1] == of_runs[2] != of_runs[3] == of_runs[4] == of_runs[5]
