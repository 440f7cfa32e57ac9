"""What makes each recipe take seconds, and the folder of images that one of them reads."""

from pathlib import Path

import numpy as np

from trainkit import registry

RECIPES = registry.names("recipe")
TINY = {recipe: ["size=tiny"] for recipe in RECIPES}


def make_image_folder(folder: Path) -> None:
    """Leave twenty dark and twenty bright images of unequal size in `folder`."""
    from PIL import Image

    generator = np.random.default_rng(0)
    for name, brightness in (("bright", 200), ("dark", 50)):
        (folder / name).mkdir(parents=True)
        for number in range(20):
            pixels = generator.integers(0, 55, (10 + number % 3, 12, 3)) + brightness
            Image.fromarray(pixels.astype(np.uint8)).save(folder / name / f"{number:02}.png")
