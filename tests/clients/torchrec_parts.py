"""A model and data that the clients of TorchRec share."""

import torch
from client import DEVICE, RANK
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor

NAMES, ROWS, DIM = ("one", "two", "three"), 40, 16


class Net(torch.nn.Module):
    """Bags of three tables and a layer above them."""

    def __init__(self) -> None:
        super().__init__()
        tables = [EmbeddingBagConfig(name=n, embedding_dim=DIM, num_embeddings=ROWS, feature_names=[n]) for n in NAMES]
        self.bags, self.over = EmbeddingBagCollection(tables, device=DEVICE), torch.nn.Linear(3 * DIM, 1, device=DEVICE)

    def forward(self, features: KeyedJaggedTensor) -> torch.Tensor:
        return self.over(self.bags(features).values()).square().mean()


def batch(step: int) -> KeyedJaggedTensor:
    """Return bags of several lengths, other ones on every rank."""
    generator = torch.Generator().manual_seed(10 * step + RANK)
    lengths = torch.randint(0, 4, (3 * 8,), generator=generator)
    values = torch.randint(ROWS, (int(lengths.sum()),), generator=generator)
    return KeyedJaggedTensor(list(NAMES), values, lengths=lengths).to(DEVICE)
