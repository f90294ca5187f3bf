"""What the demonstration's trainer asks its workers, as JSON."""

from __future__ import annotations

import msgspec


class GenerateRequest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Body of ``POST /generate``; all prompts have one length."""

    prompts: list[list[int]]
    new_tokens: int
    temperature: float = 1.0
    seed: int = 0


class Generated(msgspec.Struct, frozen=True, kw_only=True):
    """Its answer.

    Attributes:
        logprobs: Of each token, under the weights that sampled it.
        version: Version of exactly these weights; None before the first sync.
    """

    tokens: list[list[int]]
    logprobs: list[list[float]]
    version: int | str | None


class LogitsRequest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Body of ``POST /logits``."""

    tokens: list[list[int]]


class Logits(msgspec.Struct, frozen=True, kw_only=True):
    """Its answer: the bit patterns of the float32 logits, as signed ints, flattened."""

    bits: list[int]
    version: int | str | None


class Fingerprints(msgspec.Struct, frozen=True, kw_only=True):
    """Answer of ``GET /fingerprints``: SHA-256 of the checkpoint's tensors, by name."""

    sha256: dict[str, str]
    version: int | str | None
