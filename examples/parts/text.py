"""This repository's docs as tokens: of a tokenizer that is trained on them, or bytes where its package is missing."""

from pathlib import Path

import torch
import torch.distributed as dist

import sidelane

DOCS = Path(__file__).resolve().parents[2] / "docs"
SOURCE = Path(sidelane.__file__).parent  # where the examples were copied out of the repository
BYTES = 256
MISSING = "tokens: bytes, since the package `tokenizers` is missing (pip install tokenizers)"


def read(tokenizer: str, vocabulary: int) -> tuple[torch.Tensor, int, str]:
    """The docs as tokens, how many different ones there may be, and words for that. Rank 0 makes them for all.

    Args:
        tokenizer: ``bpe``: byte pairs of the package `tokenizers`; ``bytes``; ``auto``: the first where it is there.
        vocabulary: of ``bpe``.

    Raises:
        SystemExit: on every rank, where ``bpe`` is asked for and missing.
    """
    made: list[tuple[torch.Tensor, int, str] | str | None] = [None]
    if dist.get_rank() == 0:
        files = sorted(DOCS.rglob("*.md")) or sorted(SOURCE.rglob("*.py"))
        pages = [page.read_text(encoding="utf-8") for page in files]
        try:
            made[0] = as_bytes(pages, "tokens: bytes") if tokenizer == "bytes" else as_pairs(pages, vocabulary)
        except ImportError as error:
            made[0] = as_bytes(pages, MISSING) if tokenizer == "auto" else f"--tokenizer bpe: {error}\n{MISSING}"
    dist.broadcast_object_list(made)
    (found,) = made
    if not isinstance(found, tuple):
        raise SystemExit(found)
    return found


def as_bytes(pages: list[str], words: str) -> tuple[torch.Tensor, int, str]:
    return torch.frombuffer(bytearray("\n".join(pages).encode()), dtype=torch.uint8).long(), BYTES, words


def as_pairs(pages: list[str], vocabulary: int) -> tuple[torch.Tensor, int, str]:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=vocabulary, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(pages, trainer)
    text = "\n".join(pages)
    tokens = tokenizer.encode(text).ids
    assert tokenizer.decode(tokens) == text
    found = tokenizer.get_vocab_size()
    return torch.tensor(tokens), found, f"tokens: {found} byte pairs, {len(text) / len(tokens):.1f} characters each"
