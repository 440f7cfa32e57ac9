"""Draw `recipe_NAME.svg`: how each recipe learns, from a run of it.

Type `trainkit fit recipe=NAME run_dir=FOLDER/NAME` for each, then `python docs/images/recipes.py FOLDER`.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import matplotlib.pyplot as plt

# What is shown of each recipe, and how the axis is named.
SHOWN = {
    "digits": ("validation/accuracy", "accuracy of validation"),
    "digits_mlp": ("validation/accuracy", "accuracy of validation"),
    "tabular": ("validation/accuracy", "accuracy of validation"),
    "contrastive": ("validation/matched", "partners found in validation"),
    "gan": ("validation/distance", "distance to validation images"),
    "image_classification": ("validation/accuracy", "accuracy of validation"),
    "char_lm": ("validation/bits_per_character", "bits for a byte in validation"),
    "gpt": ("validation/loss", "loss of a token in validation"),
    "finetune": ("validation/loss", "loss of a token in validation"),
}


def main(folder: Path) -> None:
    """Write the pictures beside this file."""
    plt.rcParams |= {
        "svg.hashsalt": "trainkit",
        "svg.fonttype": "none",
        "font.size": 8,
    }
    for name, (metric, title) in SHOWN.items():
        rows = [
            json.loads(line)
            for line in (folder / name / "metrics.jsonl").read_text().splitlines()
        ]
        points = [(row["step"], row[metric]) for row in rows if metric in row]
        figure, panel = plt.subplots(
            figsize=(4, 1.9), layout="constrained", facecolor="white"
        )
        panel.plot(
            *zip(*points, strict=True),
            color="#2b6cb0",
            linewidth=1.5,
            marker=".",
            markersize=4,
        )
        step, value = points[-1]
        panel.annotate(
            f"{value:.3g}",
            (step, value),
            (3, 0),
            textcoords="offset points",
            va="center",
            color="#2b6cb0",
        )
        panel.set_xlabel("steps")
        panel.set_title(title, fontsize=8, loc="left")
        panel.set_xlim(0, step * 1.08)
        panel.grid(alpha=0.3)
        panel.spines[["top", "right"]].set_visible(False)
        figure.savefig(
            Path(__file__).with_name(f"recipe_{name}.svg"), metadata={"Date": None}
        )
        plt.close(figure)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
