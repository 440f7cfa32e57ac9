"""Settings with which each recipe takes seconds, and the folder of images that one of them reads."""

from pathlib import Path

import numpy as np

TINY = {
    "digits": ["data.num_train=64", "data.batch_size=16", "task.width=4"],
    "digits_mlp": ["data.num_train=64", "data.batch_size=16", "task.width=8"],
    "char_lm": ["data.max_bytes=20000", "data.context=16", "data.batch_size=8", "task.width=16", "task.layers=1"],
    "gan": ["data.num_train=64", "data.batch_size=16", "task.width=8"],
    "tabular": ["task.width=8"],
    "contrastive": ["data.num_train=64", "data.batch_size=16", "task.width=4", "task.features=8"],
    "image_classification": [
        "data.folder=images",
        "data.side=8",
        "data.batch_size=8",
        "data.workers=0",
        "task.depth=10",
        "task.width=8",
        "task.classes=2",
        "task.norm=group",
    ],
    "gpt": ["data.max_bytes=20000", "data.context=16", "data.batch_size=8", "task.size=tiny"],
    "finetune": [
        "data.max_bytes=20000",
        "data.context=16",
        "data.batch_size=8",
        "task.config={model_type: gpt2, n_layer: 2, n_head: 2, n_embd: 16, vocab_size: 257, n_positions: 16, "
        "attn_pdrop: 0.0, embd_pdrop: 0.0, resid_pdrop: 0.0, bos_token_id: 256, eos_token_id: 256}",
    ],
}


def make_image_folder(folder: Path) -> None:
    """Leave twenty dark and twenty bright images of unequal size in `folder`."""
    from PIL import Image

    generator = np.random.default_rng(0)
    for name, brightness in (("bright", 200), ("dark", 50)):
        (folder / name).mkdir(parents=True)
        for number in range(20):
            pixels = generator.integers(0, 55, (10 + number % 3, 12, 3)) + brightness
            Image.fromarray(pixels.astype(np.uint8)).save(folder / name / f"{number:02}.png")
