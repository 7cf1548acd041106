"""Small, typical training jobs, each as a task and as a training loop written by hand.

`Job.bare(num_steps)` returns the weights after num_steps steps of the hand-written loop on the batches of the trainer.
tests/helpers/joint_task.py contains losses that couple all rows of a step, such as SimCLR and CLIP.
"""

import math
from functools import cached_property
from itertools import islice, pairwise

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import Dataset, TensorDataset

from trainer import Objective, Task, from_dataset, from_stream
from trainer.loading.order import EpochOrder

NUM_TRAIN, GLOBAL_BATCH, LR, DECAY = 20, 6, 0.02, 0.01
EPS = 1e-5
"""Epsilon of AdamW, large enough that gradients of pure rounding error do not move weights."""
VOCABULARY, LENGTH, WIDTH = 11, 7, 8


def generator(seed):
    return torch.Generator().manual_seed(seed)


def batches(num_train=NUM_TRAIN, phase=0):
    """Yields (epoch, sample indices) for each step."""
    epoch = 0
    while True:
        order = torch.from_numpy(EpochOrder(0, epoch, phase, num_train).take(0, num_train).copy())
        yield from ((epoch, part) for part in order.split(GLOBAL_BATCH))
        epoch += 1


def adamw(model):
    trained = [p for p in model.parameters() if p.requires_grad]
    groups = [
        {"params": [p for p in trained if p.dim() >= 2]},
        {"params": [p for p in trained if p.dim() < 2], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=LR, weight_decay=DECAY, eps=EPS)


class Job(Task):
    """Job with the usual training loop. names: names of the tensors in an item."""

    defaults = {
        "lr": LR, "weight_decay": DECAY, "max_grad_norm": 0.0, "eps": EPS, "schedule": "constant", "warmup_epochs": 0.0,
        "dtype": "float64",
    }  # fmt: skip
    names: tuple[str, ...] | None = ("x", "y")
    clip = 0.0

    @staticmethod
    def data(num, seed):
        raise NotImplementedError

    @staticmethod
    def model():
        raise NotImplementedError

    @staticmethod
    def losses(model, batch):
        """Returns the loss of each sample, (B,)."""
        return F.cross_entropy(model(batch["x"]), batch["y"], reduction="none")

    @cached_property
    def _splits(self):
        sizes = enumerate((("train", NUM_TRAIN), ("val", 7)))
        return {name: from_dataset(self.data(n, seed), seed=0, names=self.names) for seed, (name, n) in sizes}

    def splits(self):
        return self._splits

    def build_objective(self):
        return OfLosses(self.model(), self.losses)

    @classmethod
    def new(cls):
        """Returns the model with the initial weights that the trainer uses."""
        torch.manual_seed(0)
        return cls.model().double()

    @classmethod
    def batch(cls, data, index):
        items = [data[i] for i in index.tolist()]
        parts = (torch.stack([torch.as_tensor(item[i]) for item in items]) for i in range(len(cls.names)))
        batch = dict(zip(cls.names, parts, strict=True))
        return {name: part.double() if part.is_floating_point() else part for name, part in batch.items()}

    @classmethod
    def bare(cls, num_steps):
        model, data = cls.new(), cls.data(NUM_TRAIN, 0)
        optimizer = adamw(model)
        for _, index in islice(batches(), num_steps):
            batch = cls.batch(data, index)
            optimizer.zero_grad()
            (cls.losses(model, batch).sum() / batch.get("weight", torch.ones(len(index))).sum()).backward()
            if cls.clip:
                nn.utils.clip_grad_norm_(model.parameters(), cls.clip)
            optimizer.step()
        return model.state_dict()


class OfLosses(Objective):
    def __init__(self, model, losses, helpers=None):
        super().__init__(model, helpers=helpers)
        self._losses = losses

    def forward(self, batch, phase="train"):
        return {"loss": self._losses(self.model, batch).sum()}


# --- classifiers of pictures and texts ---------------------------------------------------------------------------


def points(num, seed):
    x = torch.randn(num, WIDTH, generator=generator(seed))
    return TensorDataset(x, (x.sum(1) > 0).long())


class Mnist(Job):
    @staticmethod
    def data(num, seed):
        g = generator(seed)
        return TensorDataset(torch.rand(num, 1, 8, 8, generator=g), torch.randint(4, (num,), generator=g))

    @staticmethod
    def model():
        parts = [nn.Conv2d(1, 4, 3), nn.ReLU(), nn.Conv2d(4, 4, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten()]
        return nn.Sequential(*parts, nn.Linear(16, 4))


class Encoder(nn.Module):
    """Classifies texts by a Transformer over tokens, which ignores padding (token 0)."""

    def __init__(self):
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, WIDTH, padding_idx=0)
        self.places = nn.Embedding(LENGTH, WIDTH)
        self.layer = nn.TransformerEncoderLayer(WIDTH, 2, 16, dropout=0.0, batch_first=True)
        self.head = nn.Linear(WIDTH, 2)

    def forward(self, tokens):
        x = self.tokens(tokens) + self.places.weight[: tokens.shape[1]]
        return self.head(self.layer(x, src_key_padding_mask=tokens == 0)[:, 0])


def texts(num, seed):
    """Returns rows of tokens, numbered from 1, with different lengths."""
    g = generator(seed)
    lengths = torch.randint(2, LENGTH + 1, (num,), generator=g).tolist()
    return [torch.randint(1, VOCABULARY, (length,), generator=g) for length in lengths]


class Bert(Job):
    model = Encoder

    @staticmethod
    def data(num, seed):
        rows = texts(num, seed)
        return TensorDataset(nn.utils.rnn.pad_sequence(rows, True), torch.tensor([int(row[0]) % 2 for row in rows]))


class Rows(Dataset):
    """Data set indexed like a Hugging Face data set: by a number, by a list of numbers, or by `__getitems__`."""

    def __init__(self, rows, as_tensors=False):
        self.rows, self.as_tensors = rows, as_tensors

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, index):
        if isinstance(index, int):
            row = self.rows[index]
            return {name: torch.tensor(value) for name, value in row.items()} if self.as_tensors else row
        rows = [self[i] for i in index]
        return {name: [row[name] for row in rows] for name in self.rows[0]}

    def __getitems__(self, indices):
        return [self[i] for i in indices]

    def with_format(self, kind):
        return Rows(self.rows, as_tensors=kind == "torch")


def padded(rows):
    tokens = nn.utils.rnn.pad_sequence([row["input_ids"] for row in rows], batch_first=True)
    return {"x": tokens, "y": torch.stack([row["label"] for row in rows])}


class MapStyle(Bert):
    @cached_property
    def _splits(self):
        sizes = enumerate((("train", NUM_TRAIN), ("val", 7)))
        rows = {
            name: [{"input_ids": row.tolist(), "label": int(row[0]) % 2} for row in texts(n, seed)]
            for seed, (name, n) in sizes
        }
        return {name: from_dataset(Rows(own).with_format("torch"), padded, seed=0) for name, own in rows.items()}


# --- a language model --------------------------------------------------------------------------------------------


class Decoder(nn.Module):
    """Predicts the next token at each position, with tied input and output embeddings."""

    def __init__(self):
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, WIDTH)
        self.layer = nn.TransformerEncoderLayer(WIDTH, 2, 16, dropout=0.0, batch_first=True, norm_first=True)
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.head.weight = self.tokens.weight

    def forward(self, tokens):
        mask = nn.Transformer.generate_square_subsequent_mask(tokens.shape[1], dtype=self.norm.weight.dtype)
        return self.head(self.norm(self.layer(self.tokens(tokens), src_mask=mask, is_causal=True)))


class NanoGpt(Job):
    """Language model with gradient clipping, whose micro-batches have different numbers of targets."""

    model, names, clip = Decoder, ("x", "y", "weight"), 0.5
    defaults = Job.defaults | {"max_grad_norm": clip}

    @staticmethod
    def data(num, seed):
        rows = texts(num, seed)
        tokens = nn.utils.rnn.pad_sequence(rows, True)
        return TensorDataset(tokens[:, :-1], tokens[:, 1:], torch.tensor([len(row) - 1.0 for row in rows]))

    @staticmethod
    def losses(model, batch):
        logits = model(batch["x"]).transpose(1, 2)
        return F.cross_entropy(logits, batch["y"], reduction="none", ignore_index=0).sum(1)


# --- teachers ----------------------------------------------------------------------------------------------------


def mlp(*sizes):
    layers = [layer for pair in pairwise(sizes) for layer in (nn.Linear(*pair), nn.Tanh())]
    return nn.Sequential(*layers[:-1])


class Distillation(Job):
    data = staticmethod(points)

    @staticmethod
    def model():
        return mlp(WIDTH, 4, 2)

    @staticmethod
    def teacher():
        torch.manual_seed(7)
        return nn.Sequential(nn.Linear(WIDTH, 6), nn.BatchNorm1d(6), nn.Dropout(), nn.Linear(6, 2))

    def build_objective(self):
        return Distilled(self.model(), helpers={"teacher": self.teacher()})

    @classmethod
    def bare(cls, num_steps):
        teacher = cls.teacher().double().eval()
        return type("Bare", (cls,), {"losses": lambda model, batch: distilled(model, teacher, batch)}).usual(num_steps)

    usual = classmethod(Job.bare.__func__)


def distilled(model, teacher, batch):
    logits = model(batch["x"])
    with torch.no_grad():
        expected = teacher(batch["x"]).softmax(1)
    return F.cross_entropy(logits, batch["y"], reduction="none") + F.cross_entropy(logits, expected, reduction="none")


class Distilled(Objective):
    def forward(self, batch, phase="train"):
        return {"loss": distilled(self.model, self.helpers["teacher"], batch).sum()}


class Pair(nn.Module):
    def __init__(self):
        super().__init__()
        self.student, self.predictor = mlp(WIDTH, 6, 4), mlp(4, 4, 4)
        self.teacher = mlp(WIDTH, 6, 4).requires_grad_(False)
        self.teacher.load_state_dict(self.student.state_dict())

    def losses(self, batch):
        with torch.no_grad():
            target = self.teacher(batch["b"])
        return 2 - 2 * F.cosine_similarity(self.predictor(self.student(batch["a"])), target)

    @torch.no_grad()
    def follow(self, progress):
        share = 0.1 * (math.cos(math.pi * progress) + 1) / 2
        for mine, its in zip(self.teacher.parameters(), self.student.parameters(), strict=True):
            mine.lerp_(its, share)


class OfPair(Objective):
    def forward(self, batch, phase="train"):
        return {"loss": self.model.losses(batch).sum()}

    def after_step(self, phase, at):
        self.model.follow(at.progress)


class Byol(Job):
    """Compares two views of each sample; the teacher follows the student more slowly as training progresses."""

    names = ("a", "b")
    model = Pair

    @staticmethod
    def data(num, seed):
        x = torch.randn(num, WIDTH, generator=generator(seed))
        return TensorDataset(x, x + 0.1 * torch.randn(num, WIDTH, generator=generator(seed + 10)))

    def build_objective(self):
        return OfPair(self.model())

    @classmethod
    def bare(cls, num_steps):
        model, data = cls.new(), cls.data(NUM_TRAIN, 0)
        optimizer = adamw(model)
        for step, (_, index) in enumerate(islice(batches(), num_steps)):
            optimizer.zero_grad()
            model.losses(cls.batch(data, index)).mean().backward()
            optimizer.step()
            model.follow((step + 0.5) / num_steps)
        return model.state_dict()


# --- more than one loss, gradient or rate ------------------------------------------------------------------------


class Gan(Job):
    """GAN that alternates discriminator and generator steps."""

    phases, turns = ("disc", "gen"), (1, 1)
    names = ("x",)

    @staticmethod
    def data(num, seed):
        return TensorDataset(torch.randn(num, 2, generator=generator(seed)))

    @staticmethod
    def model():
        return nn.ModuleDict({"disc": mlp(2, 6, 1), "gen": mlp(2, 6, 2)})

    @cached_property
    def _noise(self):
        return from_dataset(self.data(NUM_TRAIN, 5), seed=0, names=self.names)

    def training_data(self, phase):
        return self.splits()["train"] if phase == "disc" else self._noise

    def param_groups(self, objective, phase):
        return [{"params": objective.model[phase].parameters(), "weight_decay": 0.0}]

    def build_objective(self):
        return OfGan(self.model())

    @classmethod
    def bare(cls, num_steps):
        model, optimizers = cls.new(), {}
        for phase in cls.phases:
            optimizers[phase] = torch.optim.AdamW(model[phase].parameters(), lr=LR, weight_decay=0, eps=EPS)
        sources = [(phase, cls.data(NUM_TRAIN, (0, 5)[i]), batches(phase=i)) for i, phase in enumerate(cls.phases)]
        for step in range(num_steps):
            phase, data, order = sources[step % 2]
            model.zero_grad()
            gan_loss(model, data[next(order)[1]][0].double(), phase).mean().backward()
            optimizers[phase].step()
        return model.state_dict()


def gan_loss(model, x, phase):
    if phase == "gen":
        return F.softplus(-model["disc"](model["gen"](x))).squeeze(1)
    with torch.no_grad():
        fake = model["gen"](x.flip(1))
    return (F.softplus(-model["disc"](x)) + F.softplus(model["disc"](fake))).squeeze(1)


class OfGan(Objective):
    def forward(self, batch, phase="disc"):
        return {"loss": gan_loss(self.model, batch["x"], phase).sum()}


class Sam(Job):
    """Sharpness-aware minimisation, with `first_step` and `second_step` as in the reference implementation."""

    data = staticmethod(points)
    rho = 0.05
    defaults = Job.defaults | {"sam_rho": rho}

    @staticmethod
    def model():
        return mlp(WIDTH, 6, 2)

    @classmethod
    def bare(cls, num_steps):
        model, data = cls.new(), cls.data(NUM_TRAIN, 0)
        optimizer, params = adamw(model), [*model.parameters()]
        for _, index in islice(batches(), num_steps):
            batch = cls.batch(data, index)
            optimizer.zero_grad()
            cls.losses(model, batch).mean().backward()
            norm = torch.stack([p.grad.norm() for p in params]).norm()
            before = [p.detach().clone() for p in params]
            with torch.no_grad():
                for p in params:
                    p.add_(p.grad * (cls.rho / (norm + 1e-12)))
            optimizer.zero_grad()
            cls.losses(model, batch).mean().backward()
            for p, old in zip(params, before, strict=True):
                p.data = old
            optimizer.step()
        return model.state_dict()


class Plateau(Job):
    """ReduceLROnPlateau on a validation set with swapped labels, whose loss rises as the model learns."""

    data = staticmethod(points)
    defaults = Job.defaults | {"schedule": "plateau", "plateau_factor": 0.5, "plateau_patience": 1}

    @staticmethod
    def model():
        return mlp(WIDTH, 6, 2)

    @classmethod
    def _turned(cls, seed):
        x, y = cls.data(7, seed).tensors
        return TensorDataset(x, 1 - y)

    @cached_property
    def _splits(self):
        data = {"train": self.data(NUM_TRAIN, 0), "val": self._turned(1)}
        return {name: from_dataset(own, seed=0, names=self.names) for name, own in data.items()}

    @classmethod
    def bare(cls, num_steps):
        model, data = cls.new(), cls.data(NUM_TRAIN, 0)
        optimizer, held_out = adamw(model), cls.batch(cls._turned(1), torch.arange(7))
        plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.5, patience=0, threshold=0)
        before = 0
        for epoch, index in islice(batches(), num_steps):
            if epoch > before:
                with torch.no_grad():
                    plateau.step(cls.losses(model, held_out).mean())
            before, batch = epoch, cls.batch(data, index)
            optimizer.zero_grad()
            cls.losses(model, batch).mean().backward()
            optimizer.step()
        return model.state_dict()


# --- other orders of samples -------------------------------------------------------------------------------------


class Weighted(Job):
    """Draws samples like WeightedRandomSampler: with repetitions, and more per epoch than the data set contains."""

    data = staticmethod(points)
    num_draws = 26

    @staticmethod
    def model():
        return mlp(WIDTH, 6, 2)

    @classmethod
    def draws(cls, epoch):
        labels = cls.data(NUM_TRAIN, 0).tensors[1].numpy()
        weights = np.where(labels == 1, 5.0, 1.0)
        return np.random.default_rng([0, epoch]).choice(NUM_TRAIN, cls.num_draws, p=weights / weights.sum())

    def num_samples(self, phase):
        return self.num_draws

    def order(self, phase, epoch, global_batch_size):
        return np.split(self.draws(epoch), range(global_batch_size, self.num_draws, global_batch_size))

    @classmethod
    def bare(cls, num_steps):
        model, data = cls.new(), cls.data(NUM_TRAIN, 0)
        optimizer = adamw(model)
        drawn = (part for epoch in range(num_steps) for part in torch.from_numpy(cls.draws(epoch)).split(GLOBAL_BATCH))
        for index in islice(drawn, num_steps):
            optimizer.zero_grad()
            cls.losses(model, cls.batch(data, index)).mean().backward()
            optimizer.step()
        return model.state_dict()


class Streamed(Job):
    """Reads samples in order from one stream that continues through all epochs."""

    @staticmethod
    def stream():
        g = generator(0)
        while True:
            x = torch.randn(WIDTH, generator=g)
            yield x, (x.sum() > 0).long()

    @staticmethod
    def model():
        return mlp(WIDTH, 6, 2)

    @cached_property
    def _splits(self):
        sizes = {"train": NUM_TRAIN, "val": 7}
        return {
            name: from_stream(self.stream, samples_per_epoch=size, seed=0, names=self.names)
            for name, size in sizes.items()
        }

    @classmethod
    def bare(cls, num_steps):
        model, samples = cls.new(), cls.stream()
        optimizer = adamw(model)
        for _, index in islice(batches(), num_steps):
            x, y = zip(*islice(samples, len(index)), strict=True)
            optimizer.zero_grad()
            cls.losses(model, {"x": torch.stack(x).double(), "y": torch.stack(y)}).mean().backward()
            optimizer.step()
        return model.state_dict()


JOBS = {
    job.__name__: job
    for job in (Mnist, Bert, MapStyle, NanoGpt, Distillation, Byol, Gan, Sam, Plateau, Weighted, Streamed)
}
