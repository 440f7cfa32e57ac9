"""Tasks of the kinds that a pipeline must take as they are."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from trainkit.task import TaskModule


class _Task(TaskModule):
    def configure_optimizers(self):
        # AdamW turns rounding of a gradient that is all but zero into a whole step: only in double precision.
        if next(self.parameters()).dtype == torch.float64:
            return torch.optim.AdamW(self.parameters(), lr=1e-2)
        return torch.optim.SGD(self.parameters(), lr=0.05, momentum=0.9)


class Mlp(_Task):
    def __init__(self, width=16, depth=6, dropout=0.0):
        super().__init__()
        layers = [nn.Linear(8, width)]
        for _ in range(depth):
            layers += [nn.Linear(width, width), nn.ReLU(inplace=True), nn.Dropout(dropout)]
        self.net = nn.Sequential(*layers, nn.Linear(width, 3))

    def training_step(self, batch):
        inputs, targets = batch
        logits = self.net(inputs)
        accuracy = (logits.argmax(-1) == targets).double().mean()
        return {"loss": F.cross_entropy(logits, targets), "accuracy": accuracy}

    def validation_step(self, batch):
        return self.training_step(batch)

    def predict_step(self, batch):
        return self.net(batch[0]).argmax(-1)

    @staticmethod
    def batch(size, generator):
        return (
            torch.randn(size, 8, generator=generator),
            torch.randint(0, 3, (size,), generator=generator),
        )


class _Residual(nn.Module):
    def __init__(self, inputs, outputs, stride):
        super().__init__()
        self.first = nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False)
        self.first_norm = nn.BatchNorm2d(outputs)
        self.second = nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False)
        self.second_norm = nn.BatchNorm2d(outputs)
        self.relu = nn.ReLU(inplace=True)
        self.shortcut = nn.Conv2d(inputs, outputs, 1, stride) if stride > 1 else None

    def forward(self, x):
        skip = x if self.shortcut is None else self.shortcut(x)
        out = self.relu(self.first_norm(self.first(x)))
        out = self.second_norm(self.second(out))
        out += skip
        return self.relu(out)


class ResNet(_Task):
    def __init__(self):
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 8, 3, 1, 1), nn.BatchNorm2d(8), nn.ReLU(inplace=True))
        self.blocks = nn.ModuleList(
            [_Residual(8, 8, 1), _Residual(8, 16, 2), _Residual(16, 16, 1), _Residual(16, 16, 1)]
        )
        self.head = nn.Linear(16, 4)

    def training_step(self, batch):
        x = self.stem(batch["image"])
        for block in self.blocks:
            x = block(x)
        logits = self.head(x.mean((2, 3)))
        return F.cross_entropy(logits, batch["label"])

    @staticmethod
    def batch(size, generator):
        return {
            "image": torch.randn(size, 3, 8, 8, generator=generator),
            "label": torch.randint(0, 4, (size,), generator=generator),
        }


class _Block(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.heads = heads
        self.norm_attention = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.projection = nn.Linear(width, width)
        self.norm_feed = nn.LayerNorm(width)
        self.feed_forward = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x):
        batch, length, width = x.shape
        heads = self.qkv(self.norm_attention(x)).view(batch, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(heads[0], heads[1], heads[2], is_causal=True)
        x = x + self.projection(attended.transpose(1, 2).reshape(batch, length, width))
        return x + self.feed_forward(self.norm_feed(x))


class Gpt(_Task):
    """Embedding and head share their weight."""

    def __init__(self, width=16, depth=4, vocabulary=32, length=8, heads=2):
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, width)
        self.positions = nn.Parameter(torch.randn(length, width) * 0.02)
        self.blocks = nn.ModuleList([_Block(width, heads) for _ in range(depth)])
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)
        self.head.weight = self.tokens.weight

    def training_step(self, batch):
        inputs, targets = batch[:, :-1], batch[:, 1:]
        x = self.tokens(inputs) + self.positions[: inputs.shape[1]]
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.norm(x))
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())

    @staticmethod
    def batch(size, generator):
        return torch.randint(0, 32, (size, 9), generator=generator)


class UNet(_Task):
    def __init__(self):
        super().__init__()
        widths = [4, 8, 12]
        self.down = nn.ModuleList(
            [nn.Conv2d(inputs, outputs, 3, 1, 1) for inputs, outputs in zip([1, *widths], widths, strict=False)]
        )
        self.middle = nn.Conv2d(12, 12, 3, 1, 1)
        self.up = nn.ModuleList([nn.Conv2d(24, 8, 3, 1, 1), nn.Conv2d(16, 4, 3, 1, 1), nn.Conv2d(8, 4, 3, 1, 1)])
        self.last = nn.Conv2d(4, 1, 1)

    def training_step(self, batch):
        x, target = batch
        skips = []
        for layer in self.down:
            x = torch.relu(layer(x))
            skips.append(x)
            x = F.max_pool2d(x, 2)
        x = torch.relu(self.middle(x))
        for layer in self.up:
            x = F.interpolate(x, scale_factor=2)
            x = torch.relu(layer(torch.cat([x, skips.pop()], 1)))
        return F.mse_loss(self.last(x), target)

    @staticmethod
    def batch(size, generator):
        return (
            torch.randn(size, 1, 16, 16, generator=generator),
            torch.randn(size, 1, 16, 16, generator=generator),
        )


class EncoderDecoder(_Task):
    """Every layer of the decoder uses the encoder's result."""

    def __init__(self, width=16):
        super().__init__()
        self.source = nn.Embedding(16, width)
        self.target = nn.Embedding(16, width)
        self.encoder = nn.ModuleList(
            [nn.TransformerEncoderLayer(width, 2, 32, 0.0, batch_first=True) for _ in range(3)]
        )
        self.decoder = nn.ModuleList(
            [nn.TransformerDecoderLayer(width, 2, 32, 0.0, batch_first=True) for _ in range(3)]
        )
        self.head = nn.Linear(width, 16)

    def training_step(self, batch):
        memory = self.source(batch["source"])
        for layer in self.encoder:
            memory = layer(memory)
        x = self.target(batch["target"][:, :-1])
        mask = nn.Transformer.generate_square_subsequent_mask(x.shape[1], device=x.device, dtype=x.dtype)
        for layer in self.decoder:
            x = layer(x, memory, tgt_mask=mask)
        logits = self.head(x)
        return F.cross_entropy(logits.flatten(0, 1), batch["target"][:, 1:].flatten())

    @staticmethod
    def batch(size, generator):
        return {
            "source": torch.randint(0, 16, (size, 5), generator=generator),
            "target": torch.randint(0, 16, (size, 6), generator=generator),
        }


@dataclass
class _State:
    hidden: Tensor
    penalty: Tensor
    depth: int


class _StateLayer(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.linear = nn.Linear(width, width)

    def forward(self, state, *, scale=None):
        hidden = torch.tanh(self.linear(state.hidden)) * (1.0 if scale is None else scale)
        return _State(hidden, state.penalty + hidden.square().mean(), state.depth + 1)


class ManyInputs(_Task):
    """Two inputs, a dataclass between layers, a dict as output, a buffer, noise, and a returned weight."""

    def __init__(self, width=12):
        super().__init__()
        self.left = nn.Linear(6, width)
        self.right = nn.Linear(4, width)
        self.register_buffer("scale", torch.tensor(0.9))
        self.layers = nn.ModuleList([_StateLayer(width) for _ in range(4)])
        self.heads = nn.ModuleDict({"mean": nn.Linear(width, 1), "spread": nn.Linear(width, 1)})

    def forward(self, left, right):
        state = _State(self.left(left) + self.right(right), torch.zeros((), dtype=left.dtype), 0)
        for layer in self.layers:
            assert state.hidden.shape[-1] == 12
            state = layer(state, scale=self.scale)
        outputs = {name: head(state.hidden) for name, head in self.heads.items()}
        return {**outputs, "penalty": state.penalty, "depth": state.depth}

    def training_step(self, batch):
        outputs = self(batch["left"], right=batch["right"])
        assert outputs["depth"] == 4
        error = (outputs["mean"] - batch["target"]).square()
        weight = batch["weight"].sum()
        loss = (error * batch["weight"]).sum() / weight + 0.1 * outputs["penalty"]
        loss = loss + 0.01 * outputs["spread"].square().mean()
        return {"loss": loss, "weight": weight, "error": error.mean()}

    @staticmethod
    def batch(size, generator):
        return {
            "left": torch.randn(size, 6, generator=generator),
            "right": torch.randn(size, 4, generator=generator),
            "target": torch.randn(size, 1, generator=generator),
            "weight": torch.rand(size, 1, generator=generator) + 0.5,
        }


OWN = {model.__name__: model for model in (Mlp, ResNet, Gpt, UNet, EncoderDecoder, ManyInputs)}
