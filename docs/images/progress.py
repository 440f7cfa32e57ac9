"""Draw `progress.svg`: what a terminal shows in the middle of `trainkit fit recipe=digits`, from a real run.

Type `python docs/images/progress.py`; it needs the extras `dev` and `recipes`.
"""

from __future__ import annotations

import fcntl
import os
import pty
import struct
import subprocess
import sys
import tempfile
import termios
from pathlib import Path

import pyte
from rich.console import Console
from rich.style import Style
from rich.text import Text

COLUMNS, ROWS = 92, 32
COMMAND = "trainkit fit recipe=digits"
OVERRIDES = [
    "trainer.max_duration=6epoch",
    "trainer.log_every=5step",
    "data.evaluation_batch_size=1",
]
MOMENT = ("epoch 3/6", "validation  ━")


def main() -> None:
    """Write the picture beside this file."""
    with tempfile.TemporaryDirectory() as folder:
        lines = screen_at_the_moment(Path(folder))
    console = Console(record=True, width=COLUMNS, file=open(os.devnull, "w"))  # noqa: SIM115
    console.print(Text("$ ", style="dim") + Text(COMMAND, style="bold"))
    for line in lines:
        console.print(line)
    svg = console.export_svg(title="trainkit", unique_id="progress")
    Path(__file__).with_name("progress.svg").write_text(svg, encoding="utf-8")


def screen_at_the_moment(folder: Path) -> list[Text]:
    """Run the command in a pseudo-terminal and return its lines when all texts of the moment are shown."""
    screen = pyte.Screen(COLUMNS, ROWS)
    stream = pyte.ByteStream(screen)
    near, far = pty.openpty()
    fcntl.ioctl(far, termios.TIOCSWINSZ, struct.pack("HHHH", ROWS, COLUMNS, 0, 0))
    process = subprocess.Popen(
        [
            sys.executable,
            "-m",
            *COMMAND.split(),
            *OVERRIDES,
            "run_dir=runs/digits/first",
        ],
        stdin=far,
        stdout=far,
        stderr=far,
        start_new_session=True,
        cwd=folder,
        env={**os.environ, "TERM": "xterm-256color"},
    )
    os.close(far)
    try:
        while not all(text in "\n".join(screen.display) for text in MOMENT):
            stream.feed(os.read(near, 65536))
    finally:
        process.kill()
        process.wait()
        os.close(near)
    last = max(row for row, text in enumerate(screen.display) if text.strip())
    return [_line(screen, row) for row in range(last + 1)]


def _line(screen: pyte.Screen, row: int) -> Text:
    line = Text(no_wrap=True)
    for column in range(COLUMNS):
        character = screen.buffer[row][column]
        colour = None if character.fg == "default" else character.fg
        # pyte does not tell dim characters, which the rest of a bar is.
        style = Style(color=colour, bold=character.bold, dim=character.data == "─")
        line.append(character.data, style=style)
    line.rstrip()
    return line


if __name__ == "__main__":
    main()
