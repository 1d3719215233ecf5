"""Encoders, reward signals and trainers as a user has them in a file, `own_parts:Class`."""

# ruff: noqa: ARG002  # the signatures are the contract
import torch
from torch import nn

from pipeline.algos.reward_signals import RewardSignal


class Normalised(nn.Sequential):
    """Dense layers with layer normalisation."""

    def __init__(self, shape, output):
        super().__init__(
            nn.Linear(shape[0], 24), nn.LayerNorm(24), nn.GELU(approximate="tanh"),
            nn.Linear(24, 12, bias=False), nn.ELU(), nn.Dropout(0.5),
            nn.Linear(12, output), nn.SiLU(inplace=True),
        )  # fmt: skip


class Residual(nn.Module):
    """Dense layers whose input is added, with arithmetic of the function interface."""

    def __init__(self, shape, output):
        super().__init__()
        self.first, self.second = nn.Linear(*shape, 16), nn.Linear(16, 16)
        self.last = nn.Linear(35, output)

    def forward(self, x):
        y = torch.tanh(self.first(x))
        y = y + torch.sigmoid(self.second(y)) * 0.5 - y.square() / (1.0 + y.exp())
        mean = y.mean(-1, keepdim=True)
        low, high = (y - mean).clamp(-1.0, 1.0).chunk(2, dim=-1)
        two, total = y[:, -20:4][:, 2:4], y.sum(1, keepdim=True)
        return -self.last(torch.cat((high, low, 2.0 - y, two, total), 1))


class Convolutional(nn.Sequential):
    """Convolutions with batch normalisation and both poolings."""

    def __init__(self, shape, output):
        super().__init__(
            nn.Conv2d(shape[0], 6, 3, padding=1), nn.BatchNorm2d(6), nn.ReLU(inplace=True),
            nn.MaxPool2d(3, stride=2, padding=1), nn.Conv2d(6, 6, 3, groups=2), nn.LeakyReLU(0.2),
            nn.AvgPool2d(2), nn.Hardtanh(), nn.Flatten(), nn.LazyLinear(output),
        )  # fmt: skip
        nn.init.normal_(self[1].running_mean)
        self(torch.zeros(1, *shape))


class Sequence(nn.Module):
    """A vector as a sequence: a convolution in one dimension, and its mean over time."""

    def __init__(self, shape, output):
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv1d(2, 8, 3, padding=1, dilation=1),
            nn.BatchNorm1d(8),
            nn.ReLU6(),
            nn.MaxPool1d(2),
        )
        self.last = nn.Linear(8, output)

    def forward(self, x):
        return self.last(self.layers(x.unflatten(1, (2, -1))).mean(-1))


class Attentive(nn.Module):
    """Self-attention of three tokens with a residual addition, then a whole Transformer layer."""

    def __init__(self, shape, output):
        super().__init__()
        self.embed = nn.Linear(shape[0] // 3, 8)
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)
        self.layer = nn.TransformerEncoderLayer(8, 4, 16, batch_first=True)
        self.last = nn.Linear(24, output)

    def forward(self, x):
        tokens = self.embed(x.view(len(x), 3, -1))
        tokens = tokens + self.attention(tokens, tokens, tokens, need_weights=False)[0]
        return self.last(self.layer(tokens).flatten(1))


class ExactGelu(nn.Sequential):
    def __init__(self, shape, output):
        super().__init__(nn.Linear(*shape, output), nn.GELU())


class Recurrent(nn.Module):
    def __init__(self, shape, output):
        super().__init__()
        self.gru = nn.GRU(1, output, batch_first=True)

    def forward(self, x):
        return self.gru(x.unsqueeze(-1))[0][:, -1]


class Upsampled(nn.Sequential):
    def __init__(self, shape, output):
        super().__init__(nn.Upsample(scale_factor=2), nn.Flatten(), nn.LazyLinear(output))
        self(torch.zeros(1, *shape))


class WithToken(nn.Module):
    """A learned token before the others, repeated for each agent."""

    def __init__(self, shape, output):
        super().__init__()
        self.token = nn.Parameter(torch.zeros(1, 4))
        self.last = nn.Linear(shape[0] + 4, output)

    def forward(self, x):
        return self.last(torch.cat((self.token.expand(len(x), -1), x), dim=1))


class Narrow(nn.Linear):
    def __init__(self, shape, output):
        super().__init__(*shape, output - 1)


class Pair(nn.Linear):
    def __init__(self, shape, output):
        super().__init__(*shape, output)

    def forward(self, x):
        return super().forward(x), None


class OfBatch(nn.Linear):
    def __init__(self, shape, output):
        super().__init__(*shape, output)

    def forward(self, x):
        return super().forward(x - x.mean(0))


class WithoutOutput(nn.Linear):
    def __init__(self, shape):
        super().__init__(*shape, 4)


class Broken(nn.Module):
    def __init__(self, shape, output):
        super().__init__()
        raise KeyError("a missing size")


class NoModule:
    def __init__(self, shape, output):
        pass


def function(shape, output):
    return nn.Linear(*shape, output)


class Visits(RewardSignal):
    """Reward for observations whose rounded first number is rare; its counts are its state."""

    def __init__(self, spec, settings, *, seed, device):
        self.counts = torch.zeros(64, device=device)

    def _place(self, obs):
        return (obs[0].flatten(1)[:, 0] * 8.0).long().clamp(-32, 31) + 32

    def observe(self, obs):
        self.counts += torch.bincount(self._place(obs), minlength=64)

    def rewards(self, rows):
        return (self.counts[self._place(rows.obs)] + 1.0).rsqrt()

    def state_dict(self):
        return {"counts": self.counts}

    def load_state_dict(self, state):
        self.counts.copy_(state["counts"])


class TwoColumns(Visits):
    def rewards(self, rows):
        return super().rewards(rows).unsqueeze(1)


class BrokenSignal(Visits):
    def __init__(self, spec, settings, *, seed, device):
        raise KeyError("a missing size")
