"""Architectures and methods of training in small sizes: images, sequences, graphs, sets, detection, generation."""

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint_sequential

from tests.strategies.pipeline.zoo.chain import WIDTH, Zoo
from trainkit.optim.phase import Phase


def _vectors(size, generator):
    return torch.randn(size, WIDTH, generator=generator), torch.randn(size, WIDTH, generator=generator)


def _images(size, generator):
    return torch.randn(size, 3, 8, 8, generator=generator), torch.randint(0, 4, (size,), generator=generator)


def _tokens(size, generator):
    return torch.randint(0, 16, (size, 7), generator=generator)


class _Images(Zoo):
    """Blocks of a backbone with a linear head."""

    batch = staticmethod(_images)

    def __init__(self, *blocks, width=8):
        super().__init__()
        self.blocks, self.head = nn.Sequential(*blocks), nn.Linear(width, 4)

    def training_step(self, batch):
        features = self.blocks(batch[0]).mean((2, 3))
        return F.cross_entropy(self.head(features), batch[1], label_smoothing=0.1)


# ---- Images


class _Squeeze(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.down, self.up = nn.Conv2d(width, 2, 1), nn.Conv2d(2, width, 1)

    def forward(self, x):
        return x * self.up(F.silu(self.down(F.adaptive_avg_pool2d(x, 1)))).sigmoid()


class _Inverted(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.expand = nn.Sequential(nn.Conv2d(width, 16, 1, bias=False), nn.BatchNorm2d(16), nn.SiLU(inplace=True))
        self.depthwise = nn.Sequential(nn.Conv2d(16, 16, 3, 1, 1, groups=16, bias=False), nn.BatchNorm2d(16), nn.SiLU())
        self.squeeze, self.project = _Squeeze(16), nn.Sequential(nn.Conv2d(16, width, 1), nn.BatchNorm2d(width))

    def forward(self, x):
        return x + self.project(self.squeeze(self.depthwise(self.expand(x))))


class EfficientNet(_Images):
    def __init__(self):
        super().__init__(nn.Conv2d(3, 8, 3, 2, 1), _Inverted(8), _Inverted(8))


class _NextBlock(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.depthwise, self.norm = nn.Conv2d(width, width, 3, 1, 1, groups=width), nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 16), nn.Linear(16, width)
        self.scale = nn.Parameter(torch.full((width,), 0.1))

    def forward(self, x):
        y = self.norm(self.depthwise(x).permute(0, 2, 3, 1))
        return x + (self.scale * self.down(F.gelu(self.up(y)))).permute(0, 3, 1, 2)


class ConvNeXt(_Images):
    def __init__(self):
        super().__init__(nn.Conv2d(3, 8, 2, 2), _NextBlock(8), _NextBlock(8))


class DenseNet(Zoo):
    """Every layer is given the results of all earlier ones."""

    batch = staticmethod(_images)

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([nn.Conv2d(3 + 4 * index, 4, 3, 1, 1) for index in range(5)])
        self.head = nn.Linear(23, 4)

    def training_step(self, batch):
        features = [batch[0]]
        for layer in self.layers:
            features.append(layer(torch.cat(features, 1)).relu())
        return F.cross_entropy(self.head(torch.cat(features, 1).mean((2, 3))), batch[1])


class Mixer(Zoo):
    """Patches are mixed by the transposed tensor."""

    batch = staticmethod(_images)

    def __init__(self):
        super().__init__()
        self.patches, self.head = nn.Conv2d(3, 8, 4, 4), nn.Linear(8, 4)
        self.tokens = nn.ModuleList([nn.Linear(4, 4) for _ in range(3)])
        self.channels = nn.ModuleList([nn.Linear(8, 8) for _ in range(3)])

    def training_step(self, batch):
        x = self.patches(batch[0]).flatten(2).mT
        for tokens, channels in zip(self.tokens, self.channels, strict=True):
            x = x + tokens(x.mT).mT
            x = x + channels(F.layer_norm(x, (8,)))
        return F.cross_entropy(self.head(x.mean(1)), batch[1])


class Windows(Zoo):
    """Attention in shifted windows with a table of relative places."""

    batch = staticmethod(_images)

    def __init__(self):
        super().__init__()
        self.patches, self.head = nn.Conv2d(3, 8, 2, 2), nn.Linear(8, 4)
        self.qkv = nn.ModuleList([nn.Linear(8, 24) for _ in range(3)])
        self.bias = nn.Parameter(torch.randn(7))
        places = torch.arange(4)
        self.register_buffer("distance", places[:, None] - places + 3, persistent=False)

    def training_step(self, batch):
        x = self.patches(batch[0]).permute(0, 2, 3, 1)
        for index, qkv in enumerate(self.qkv):
            shifted = x.roll((-index % 2, -index % 2), (1, 2))
            q, k, v = qkv(shifted).chunk(3, -1)
            x = x + F.scaled_dot_product_attention(q, k, v, attn_mask=self.bias[self.distance]).roll(index % 2, 1)
        return F.cross_entropy(self.head(x.mean((1, 2))), batch[1])


class Detector(Zoo):
    """A pyramid with several heads; the targets are dictionaries, and the losses too."""

    def __init__(self):
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3, 1, 1)
        self.down = nn.ModuleList([nn.Conv2d(8, 8, 3, 2, 1) for _ in range(2)])
        self.lateral = nn.ModuleList([nn.Conv2d(8, 8, 1) for _ in range(2)])
        self.heads = nn.ModuleDict({"box": nn.Conv2d(8, 4, 1), "label": nn.Conv2d(8, 3, 1)})

    def pyramid(self, x):
        first = self.down[0](self.stem(x).relu())
        second = self.lateral[1](self.down[1](first.relu()))
        return {"fine": self.lateral[0](first) + F.interpolate(second, scale_factor=2), "coarse": second}

    def training_step(self, batch):
        losses = {}
        for level, features in self.pyramid(batch["image"]).items():
            found = {name: head(features).flatten(2).mean(-1) for name, head in self.heads.items()}
            losses[f"{level}_box"] = F.smooth_l1_loss(found["box"], batch["targets"]["boxes"])
            losses[f"{level}_label"] = F.cross_entropy(found["label"], batch["targets"]["labels"])
        return {"loss": sum(losses.values()), **losses}

    @staticmethod
    def batch(size, generator):
        labels = torch.randint(0, 3, (size,), generator=generator)
        targets = {"boxes": torch.rand(size, 4, generator=generator), "labels": labels}
        return {"image": _images(size, generator)[0], "targets": targets, "names": ["image"] * size}


# ---- Sequences


class _Language(Zoo):
    batch = staticmethod(_tokens)

    def __init__(self):
        super().__init__()
        self.embedding, self.head = nn.Embedding(16, WIDTH), nn.Linear(WIDTH, 16)

    def body(self, x):
        return x

    def training_step(self, batch):
        logits = self.head(self.body(self.embedding(batch[:, :-1])))
        return F.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())


class RecurrentLanguage(_Language):
    """Two recurrent layers, of which the second one begins where the first one ended."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.LSTM(WIDTH, WIDTH, batch_first=True), nn.LSTM(WIDTH, WIDTH, batch_first=True)

    def body(self, x):
        x, state = self.first(x)
        return self.second(x, state)[0]


class TiedLanguage(_Language):
    """The head has the weight of the embedding."""

    def __init__(self):
        super().__init__()
        self.head.weight = self.embedding.weight
        self.layers = nn.ModuleList([nn.Linear(WIDTH, WIDTH) for _ in range(4)])

    def body(self, x):
        for layer in self.layers:
            x = x + layer(x).tanh()
        return x


class TiedByFunction(TiedLanguage):
    """The weight of the embedding is used by a function."""

    def training_step(self, batch):
        logits = F.linear(self.body(self.embedding(batch[:, :-1])), self.embedding.weight)
        return F.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())


class SameBlock(_Language):
    """One block is called four times."""

    def __init__(self):
        super().__init__()
        self.block = nn.TransformerEncoderLayer(WIDTH, 2, 8, 0.0, batch_first=True)

    def body(self, x):
        for _ in range(4):
            x = self.block(x)
        return x


class Rotary(_Language):
    """Attention with rotary embeddings by complex numbers, linear biases and grouped heads."""

    def __init__(self):
        super().__init__()
        self.qkv = nn.ModuleList([nn.Linear(WIDTH, 2 * WIDTH) for _ in range(3)])
        angles = torch.outer(torch.arange(6), torch.tensor([1.0])).double()
        self.register_buffer("turns", torch.polar(torch.ones_like(angles), angles), persistent=False)

    def turned(self, x):
        pairs = torch.view_as_complex(x.reshape(*x.shape[:-1], -1, 2))
        return torch.view_as_real(pairs * self.turns).flatten(-2)

    def body(self, x):
        bias = -(torch.arange(6)[:, None] - torch.arange(6)).clamp(min=0).to(x.dtype)
        for qkv in self.qkv:
            q, k, v = (part.unflatten(-1, (-1, 2)).transpose(1, 2) for part in qkv(x).split([6, 2, 4], -1))
            v = v.mean(1, keepdim=True)
            attended = F.scaled_dot_product_attention(
                self.turned(q), self.turned(k), v, attn_mask=bias, enable_gqa=True
            )
            x = x + attended.transpose(1, 2).flatten(2)
        return x


class Scan(_Language):
    """A selective state that is carried over the positions."""

    def __init__(self):
        super().__init__()
        self.gates = nn.ModuleList([nn.Linear(WIDTH, 2 * WIDTH) for _ in range(3)])
        self.decay = nn.ParameterList([nn.Parameter(torch.zeros(WIDTH)) for _ in range(3)])

    def body(self, x):
        for gates, decay in zip(self.gates, self.decay, strict=True):
            state, states = torch.zeros_like(x[:, 0]), []
            keep, new = gates(x).chunk(2, -1)
            for position in range(x.shape[1]):
                kept = (keep[:, position] + decay).sigmoid()
                state = kept * state + (1 - kept) * new[:, position]
                states.append(state)
            x = x + torch.stack(states, 1)
        return x


class Transducer(_Language):
    """CTC over the positions."""

    def training_step(self, batch):
        logits = self.head(self.body(self.embedding(batch)).tanh()).log_softmax(-1).transpose(0, 1)
        lengths = torch.full((len(batch),), 7), torch.full((len(batch),), 2)
        return F.ctc_loss(logits, batch[:, :2] % 15 + 1, *lengths)


class TokenWeights(TiedLanguage):
    """Masks tokens, weighs the others, and says what the batch weighs."""

    def training_step(self, batch):
        logits = self.head(self.body(self.embedding(batch[:, :-1])))
        targets = batch[:, 1:].masked_fill(batch[:, 1:] < 4, -100)
        count = (targets != -100).sum().clamp(min=1)
        loss = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum", ignore_index=-100) / count
        return {"loss": loss, "weight": count, "right": (logits.argmax(-1) == targets).sum() / count}


class Seq2Seq(_Language):
    """A decoder that attends to the encoder's states in a loop and feeds its own words."""

    def __init__(self):
        super().__init__()
        self.encoder, self.cell = nn.GRU(WIDTH, WIDTH, batch_first=True), nn.GRUCell(2 * WIDTH, WIDTH)

    def training_step(self, batch):
        memory, state = self.encoder(self.embedding(batch[:, :4]))
        state, word, loss = state[0], batch[:, 3], 0.0
        for position in range(4, 7):
            weights = torch.einsum("bd,btd->bt", state, memory).softmax(-1)
            context = torch.bmm(weights[:, None], memory)[:, 0]
            state = self.cell(torch.cat([self.embedding(word), context], -1), state)
            logits = self.head(state)
            loss = loss + F.cross_entropy(logits, batch[:, position])
            word = batch[:, position]
        return loss / 3


class Chunked(Zoo):
    """A checkpointed sequential."""

    batch = staticmethod(_vectors)

    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(*[nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(6)])

    def training_step(self, batch):
        return (checkpoint_sequential(self.net, 3, batch[0], use_reentrant=False) - batch[1]).square().mean()


# ---- Graphs and tables


class GraphNet(Zoo):
    """Attention along the edges of graphs, normalized over the neighbours."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(WIDTH, WIDTH) for _ in range(3)])
        self.scores = nn.ModuleList([nn.Linear(2 * WIDTH, 1) for _ in range(3)])
        self.head = nn.Linear(WIDTH, 1)

    def training_step(self, batch):
        x, (source, target) = batch["x"], batch["edges"]
        for layer, score in zip(self.layers, self.scores, strict=True):
            weights = score(torch.cat([x[source], x[target]], -1)).exp()
            total = torch.zeros(len(x), 1, dtype=x.dtype).index_add(0, target, weights)
            messages = layer(x)[source] * weights / total[target]
            x = x + torch.zeros_like(x).index_add(0, target, messages).relu()
        pooled = torch.zeros(2, WIDTH, dtype=x.dtype).scatter_reduce(
            0, batch["graph"][:, None].expand_as(x), x, "amax", include_self=False
        )
        return self.head(pooled).square().mean()

    @staticmethod
    def batch(size, generator):
        count = 2 * size
        edges = torch.arange(count).repeat(2), torch.cat([torch.arange(count).roll(1), torch.arange(count).roll(3)])
        return {"x": torch.randn(count, WIDTH, generator=generator), "edges": edges, "graph": torch.arange(count) % 2}


class Factorization(Zoo):
    """Sparse embeddings of users and items with biases and crossed features."""

    def __init__(self):
        super().__init__()
        self.users, self.items = nn.Embedding(9, WIDTH), nn.Embedding(9, WIDTH)
        self.bias, self.deep = nn.Embedding(9, 1), nn.Sequential(nn.Linear(2 * WIDTH, 8), nn.ReLU(), nn.Linear(8, 1))

    def training_step(self, batch):
        users, items = self.users(batch[0][:, 0]), self.items(batch[0][:, 1])
        found = (
            (users * items).sum(-1) + self.bias(batch[0][:, 1])[:, 0] + self.deep(torch.cat([users, items], -1))[:, 0]
        )
        return F.binary_cross_entropy_with_logits(found, batch[1])

    @staticmethod
    def batch(size, generator):
        return torch.randint(0, 9, (size, 2), generator=generator), torch.rand(size, generator=generator)


# ---- Generation and other methods


class _Body(Zoo):
    batch = staticmethod(_vectors)

    def __init__(self, depth=4):
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(WIDTH, WIDTH) for _ in range(depth)])

    def body(self, x, start=0, stop=None):
        for layer in self.layers[start:stop]:
            x = layer(x).tanh()
        return x


class Autoencoder(_Body):
    """A variational one: the noise is that of the batch, the decoder has the encoder's weights transposed."""

    def __init__(self):
        super().__init__()
        self.mean, self.spread = nn.Linear(WIDTH, 3), nn.Linear(WIDTH, 3)
        self.decoder = nn.Linear(3, WIDTH)

    def training_step(self, batch):
        hidden = self.body(batch[0])
        mean, spread = self.mean(hidden), self.spread(hidden)
        posterior = torch.distributions.Normal(mean, (0.5 * spread).exp(), validate_args=False)
        y = self.decoder(mean + posterior.stddev * batch[1][:, :3])
        for layer in reversed(self.layers):
            y = F.linear(y - layer.bias, layer.weight.T).tanh()
        prior = torch.distributions.Normal(torch.zeros_like(mean), torch.ones_like(mean), validate_args=False)
        divergence = torch.distributions.kl_divergence(posterior, prior).sum(-1).mean()
        return {"loss": F.mse_loss(y, batch[0]) + 0.1 * divergence, "divergence": divergence}


class Flow(_Body):
    """Couplings with their volume, as a normalizing flow has."""

    def training_step(self, batch):
        x, volume = batch[0], 0.0
        for layer in self.layers:
            first, second = x.chunk(2, -1)
            scale, shift = layer(torch.cat([first, torch.zeros_like(first)], -1)).chunk(2, -1)
            second = second * scale.tanh().exp() + shift
            volume = volume + scale.tanh().sum(-1)
            x = torch.cat([second, first], -1)
        return (0.5 * x.square().sum(-1) - volume).mean()


class Diffusion(_Body):
    """Predicts noise at times of the batch, with a schedule in a buffer."""

    def __init__(self):
        super().__init__()
        self.time = nn.Embedding(5, WIDTH)
        self.register_buffer("kept", torch.linspace(0.9, 0.1, 5))

    def training_step(self, batch):
        times = torch.arange(len(batch[0])) % 5
        kept = self.kept[times][:, None]
        noisy = kept.sqrt() * batch[0] + (1 - kept).sqrt() * batch[1]
        return F.mse_loss(self.body(noisy + self.time(times)), batch[1])


class Contrastive(_Body):
    """Both views go through one body; the loss compares all pairs."""

    def __init__(self):
        super().__init__()
        self.temperature = nn.Parameter(torch.tensor(0.5))

    def training_step(self, batch):
        first, second = (F.normalize(self.body(view), dim=-1) for view in batch)
        logits = first @ second.T * self.temperature.exp()
        labels = torch.arange(len(logits))
        return (F.cross_entropy(logits, labels) + F.cross_entropy(logits.T, labels)) / 2


class Triplets(_Body):
    def training_step(self, batch):
        anchor, near, far = self.body(torch.cat([*batch, batch[0].roll(1, 0)])).chunk(3)
        return F.triplet_margin_loss(anchor, near, far)


class Distilled(_Body):
    """A frozen teacher gives targets and hidden states."""

    def __init__(self):
        super().__init__()
        self.teacher = _Body().requires_grad_(False).eval()

    def training_step(self, batch):
        with torch.no_grad():
            early = self.teacher.body(batch[0], 0, 2)
            late = self.teacher.body(early, 2)
        x = self.body(batch[0], 0, 2)
        return F.kl_div(
            self.body(x, 2).log_softmax(-1), late.log_softmax(-1), log_target=True, reduction="batchmean"
        ) + F.mse_loss(x, early)


class SeveralLosses(_Body):
    """Losses of several depths, with trained weights."""

    def __init__(self):
        super().__init__()
        self.weights = nn.Parameter(torch.zeros(4))

    def training_step(self, batch):
        x, losses = batch[0], []
        for layer in self.layers:
            x = layer(x).tanh()
            losses.append((x - batch[1]).square().mean())
        losses = torch.stack(losses)
        return (losses * (-self.weights).exp() + self.weights).sum()


class Regularized(_Body):
    """Penalties of all weights and of distances to earlier ones."""

    def __init__(self):
        super().__init__()
        for index, parameter in enumerate(self.parameters()):
            self.register_buffer(f"before{index}", torch.zeros_like(parameter), persistent=False)

    def training_step(self, batch):
        loss = F.mse_loss(self.body(batch[0]), batch[1])
        size = sum(parameter.square().sum() for parameter in self.parameters())
        moved = sum((p - getattr(self, f"before{i}")).abs().sum() for i, p in enumerate(self.parameters()))
        return loss + 0.01 * size + 0.01 * moved


class Physics(_Body):
    """Differentiates the model by its inputs, twice."""

    def training_step(self, batch):
        x = batch[0].clone().requires_grad_()
        y = self.body(x)
        (slope,) = torch.autograd.grad(y.sum(), x, create_graph=True)
        return (y - batch[1]).square().mean() + slope.square().mean()


class Hyper(_Body):
    """One net makes the weights of another."""

    def __init__(self):
        super().__init__()
        self.made = nn.Linear(WIDTH, WIDTH * WIDTH)

    def training_step(self, batch):
        weights = self.made(self.body(batch[1], 0, 2)).view(-1, WIDTH, WIDTH)
        return torch.bmm(weights, self.body(batch[0], 2)[..., None]).square().mean()


class Equation(_Body):
    """Four stages of Runge and Kutta in a few steps of an ordinary differential equation."""

    def training_step(self, batch):
        x = batch[0]
        for _ in range(2):
            first = self.body(x, 0, 2)
            second = self.body(x + 0.5 * first, 0, 2)
            x = x + 0.25 * (first + second)
        return F.mse_loss(self.body(x, 2), batch[1])


class Policy(_Body):
    """Log-probabilities of actions, an entropy and a clipped ratio."""

    def training_step(self, batch):
        policy = torch.distributions.Categorical(logits=self.body(batch[0]), validate_args=False)
        actions = batch[1].argmax(-1)
        ratio = (policy.log_prob(actions) + 1.7).exp()
        gain = batch[1].sum(-1)
        return -torch.minimum(ratio * gain, ratio.clamp(0.8, 1.2) * gain).mean() - 0.01 * policy.entropy().mean()


class Mixture(_Body):
    """A mixture of densities with `logsumexp`."""

    def __init__(self):
        super().__init__()
        self.heads = nn.ModuleDict({name: nn.Linear(WIDTH, 3) for name in ("weight", "mean", "spread")})

    def training_step(self, batch):
        hidden = self.body(batch[0])
        weight, mean, spread = (self.heads[name](hidden) for name in ("weight", "mean", "spread"))
        density = -0.5 * ((batch[1][:, :1] - mean) / spread.exp()).square() - spread
        return -(weight.log_softmax(-1) + density).logsumexp(-1).mean()


class Steered(_Body):
    """Loops over the shape, branches by the mode and by an attribute, and skips layers by a list."""

    def __init__(self):
        super().__init__()
        self.skipped, self.scale = [1], None

    def training_step(self, batch):
        x = batch[0]
        for index, layer in enumerate(self.layers):
            x = x if index in self.skipped else layer(x).tanh()
        for column in range(0, x.shape[1], 2):
            x = x + x[:, column : column + 1].sin()
        assert self.training
        return (x - batch[1]).square().mean() * (self.scale or 1.0)


class Adversarial(Zoo):
    """A generator and a discriminator with a penalty of its gradients, one after the other."""

    batch = staticmethod(_vectors)

    def __init__(self):
        super().__init__()
        self.generator, self.discriminator = (
            nn.Sequential(*[nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(3)]) for _ in range(2)
        )

    def discriminator_step(self, batch):
        with torch.no_grad():
            made = self.generator(batch[1])
        mixed = (0.5 * (made + batch[0])).requires_grad_()
        (slope,) = torch.autograd.grad(self.discriminator(mixed).sum(), mixed, create_graph=True)
        return (self.discriminator(made) - self.discriminator(batch[0])).mean() + slope.square().mean()

    def generator_step(self, batch):
        return -self.discriminator(self.generator(batch[1])).mean()

    def configure_phases(self):
        parts = ("discriminator", self.discriminator), ("generator", self.generator)
        return [Phase(name, torch.optim.SGD(part.parameters(), lr=0.05)) for name, part in parts]


ARCHITECTURES = {
    task.__name__: task
    for task in (
        *(EfficientNet, ConvNeXt, DenseNet, Mixer, Windows, Detector),
        *(RecurrentLanguage, TiedLanguage, TiedByFunction, SameBlock, Rotary, Scan, Transducer, TokenWeights, Seq2Seq),
        *(Chunked, GraphNet, Factorization, Autoencoder, Flow, Diffusion, Contrastive, Triplets, Distilled),
        *(SeveralLosses, Regularized, Physics, Hyper, Equation, Policy, Mixture, Steered, Adversarial),
    )
}
