"""Draw `report_light.png` and `report_dark.png`: the top of the report of a real run on two ranks, in both themes.

Type `python docs/images/report.py`; it needs the extra `recipes` and chromium.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

COMMAND = "trainkit fit recipe=digits_mlp strategy=ddp strategy.devices=2 strategy.device=cpu"
OVERRIDES = [
    "trainer.max_duration=12epoch",
    "trainer.log_every=8step",
    "run_dir=runs/digits_mlp/first",
]
WIDTH, HEIGHT = 1000, 724
THEMES = {
    "light": [],
    "dark": ["--force-dark-mode", "--blink-settings=preferredColorScheme=0"],
}


def main() -> None:
    """Write both pictures beside this file."""
    chromium = shutil.which("chromium") or shutil.which("google-chrome")
    if chromium is None:
        sys.exit("chromium is not installed")
    with tempfile.TemporaryDirectory() as folder:
        subprocess.run(
            [sys.executable, "-m", *COMMAND.split(), *OVERRIDES],
            cwd=folder,
            check=True,
        )
        page = Path(folder, "runs/digits_mlp/first/report.html").as_uri()
        for theme, options in THEMES.items():
            picture = Path(__file__).with_name(f"report_{theme}.png")
            subprocess.run(
                [
                    chromium,
                    "--headless",
                    "--no-sandbox",
                    "--hide-scrollbars",
                    f"--user-data-dir={folder}/{theme}",
                    f"--window-size={WIDTH},{HEIGHT}",
                    f"--screenshot={picture}",
                    *options,
                    page,
                ],
                check=True,
                stderr=subprocess.DEVNULL,
            )


if __name__ == "__main__":
    main()
