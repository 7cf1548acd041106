"""DeepConvLSTM: convolutions followed by LSTMs (Ordonez and Roggen, Sensors 2016, 16(1), 115)."""

import torch
from torch import Tensor, nn

from models.layers.dropout import Dropout

_NUM_CONVOLUTIONS = 4
_KERNEL_SIZE = 5
_NUM_FILTERS = 64
_NUM_UNITS = 128


class DeepConvLstm(nn.Module):
    """Classifies windows of inertial signals: `logits = model(x)`, x (B, num_channels, T) -> (B, num_classes).

    Four unpadded convolutions over time, shared by all channels, shorten T to T - 16, so T must be at least 17. Two
    LSTM layers follow, and a linear layer classifies their last state. The model has 556,358 parameters for 9 channels
    and 6 classes.

    dropout: probability in [0, 1), applied before the second LSTM and before the classifier.
    """

    def __init__(self, num_channels: int = 9, num_classes: int = 6, dropout: float = 0.5) -> None:
        super().__init__()
        self.encoder = _encoder()
        # two modules, because dropout inside an nn.LSTM would draw from cuDNN's own generator on a GPU
        self.lstm1 = nn.LSTM(num_channels * _NUM_FILTERS, _NUM_UNITS, batch_first=True)
        self.lstm2 = nn.LSTM(_NUM_UNITS, _NUM_UNITS, batch_first=True)
        self.classifier = nn.Linear(_NUM_UNITS, num_classes)
        self.dropout = Dropout(dropout)
        make_recurrence_orthogonal(self.lstm1)
        make_recurrence_orthogonal(self.lstm2)

    @property
    def blocks(self) -> list[nn.Module]:
        """Returns the convolutions and each LSTM."""
        return [self.encoder, self.lstm1, self.lstm2]

    def forward(self, x: Tensor) -> Tensor:
        features = self.encoder(x.unsqueeze(1))  # (B, filters, channels, steps)
        steps = features.permute(0, 3, 2, 1).flatten(2)
        states, _ = self.lstm1(steps)
        states, _ = self.lstm2(self.dropout(states))
        return self.classifier(self.dropout(states[:, -1]))


def _encoder() -> nn.Sequential:
    """Builds convolutions (B, 1, channels, T) -> (B, filters, channels, T - 16) that do not mix channels."""
    layers: list[nn.Module] = []
    num_inputs = 1
    for _ in range(_NUM_CONVOLUTIONS):
        layers += [nn.Conv2d(num_inputs, _NUM_FILTERS, (1, _KERNEL_SIZE)), nn.ReLU()]
        num_inputs = _NUM_FILTERS
    return nn.Sequential(*layers)


@torch.no_grad()
def make_recurrence_orthogonal(lstm: nn.LSTM) -> None:
    """Initialises the recurrent weights of each gate as an orthogonal matrix."""
    for name, weight in lstm.named_parameters():
        if name.startswith("weight_hh"):
            for gate in weight.chunk(4):
                nn.init.orthogonal_(gate)
