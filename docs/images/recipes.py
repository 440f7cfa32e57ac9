"""Draw `recipes.svg`: how the recipes learn, from runs of them.

Type `trainkit fit recipe=NAME run_dir=FOLDER/NAME` for each, then `python docs/images/recipes.py FOLDER`.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import matplotlib.pyplot as plt

# What is shown of each recipe, and its name.
SHOWN = {
    "digits": ("validation/accuracy", "digits: accuracy"),
    "digits_mlp": ("validation/accuracy", "digits_mlp: accuracy"),
    "tabular": ("validation/accuracy", "tabular: accuracy"),
    "images": ("validation/accuracy", "image_classification: accuracy"),
    "contrastive": ("validation/matched", "contrastive: partners found"),
    "char_lm": ("validation/bits_per_character", "char_lm: bits for a byte"),
    "gpt": ("validation/loss", "gpt: loss of a token"),
    "finetune": ("validation/loss", "finetune: loss of a token"),
}


def main(folder: Path) -> None:
    """Write the picture beside this file."""
    plt.rcParams |= {"svg.hashsalt": "trainkit", "svg.fonttype": "none", "font.size": 8}
    figure, panels = plt.subplots(2, 4, figsize=(9, 3.6), layout="constrained")
    for panel, (name, (metric, title)) in zip(panels.flat, SHOWN.items(), strict=True):
        rows = [json.loads(line) for line in (folder / name / "metrics.jsonl").read_text().splitlines()]
        points = [(row["step"], row[metric]) for row in rows if metric in row]
        panel.plot(*zip(*points, strict=True), color="#2b6cb0", linewidth=1.5)
        panel.set_title(f"{title} {points[-1][1]:.3g}", fontsize=8)
        panel.set_xlabel("steps", fontsize=7)
        panel.grid(alpha=0.3)
        panel.spines[["top", "right"]].set_visible(False)
    figure.savefig(Path(__file__).with_name("recipes.svg"), metadata={"Date": None})


if __name__ == "__main__":
    main(Path(sys.argv[1]))
