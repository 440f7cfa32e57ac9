"""The shipped recipes' tasks in small sizes, with batches made up for them."""

import torch
from trainkit.recipes.char_lm import CharLM
from trainkit.recipes.contrastive import ContrastiveTask
from trainkit.recipes.digits import DigitsTask
from trainkit.recipes.digits_mlp import DigitsMLP
from trainkit.recipes.gan import DigitsGAN
from trainkit.recipes.gpt import GPT
from trainkit.recipes.image_classification import ResNet
from trainkit.recipes.tabular import TabularTask


def _images(size, generator, *, colours=1, side=8):
    pixels = torch.rand(size, colours, side, side, generator=generator)
    return pixels, torch.randint(0, 10, (size,), generator=generator)


class SmallCharLM(CharLM):
    def __init__(self):
        super().__init__(context=12, width=16, layers=2, heads=2)

    @staticmethod
    def batch(size, generator):
        return (torch.randint(0, 256, (size, 13), generator=generator),)


class SmallContrastive(ContrastiveTask):
    def __init__(self):
        super().__init__(width=4, features=8)

    @staticmethod
    def batch(size, generator):
        return _images(size, generator)[0], _images(size, generator)[0]


class SmallDigits(DigitsTask):
    def __init__(self):
        super().__init__(width=4)

    batch = staticmethod(_images)


class SmallDigitsMLP(DigitsMLP):
    def __init__(self):
        super().__init__(width=16)

    batch = staticmethod(_images)


class SmallGAN(DigitsGAN):
    def __init__(self):
        super().__init__(width=16, generator_every=2)

    @staticmethod
    def batch(size, generator):
        return *_images(size, generator), torch.randn(size, 16, generator=generator)


class SmallGPT(GPT):
    def __init__(self):
        super().__init__(size="tiny", context=12, recompute=True)

    @staticmethod
    def batch(size, generator):
        return torch.randint(0, 257, (size, 13), generator=generator)


class SmallImages(ResNet):
    def __init__(self):
        super().__init__(width=8)

    @staticmethod
    def batch(size, generator):
        return _images(size, generator, colours=3, side=16)


class SmallTable(TabularTask):
    def __init__(self):
        super().__init__(width=8)

    @staticmethod
    def batch(size, generator):
        return torch.randn(size, 30, generator=generator), torch.randint(0, 2, (size,), generator=generator)


RECIPES = {
    recipe.__name__: recipe
    for recipe in (
        SmallCharLM,
        SmallContrastive,
        SmallDigits,
        SmallDigitsMLP,
        SmallGAN,
        SmallGPT,
        SmallImages,
        SmallTable,
    )
}
"""All but `finetune`, whose model is one of the library's."""
