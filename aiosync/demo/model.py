"""A causal language model small enough to train in a demonstration."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional


@dataclass(frozen=True, kw_only=True)
class TinyConfig:
    """Shape of a `TinyModel`; equal configurations give equal initial weights.

    Attributes:
        vocabulary: Number of token ids.
        context: Longest sequence, prompt and answer together.
        width: Size of the residual stream, a multiple of `heads`.
        heads: Attention heads per block.
        layers: Blocks.
        seed: Seed of the initial weights.
    """

    vocabulary: int
    context: int
    width: int = 96
    heads: int = 4
    layers: int = 2
    seed: int = 0

    def __post_init__(self) -> None:
        if self.width % self.heads:
            raise ValueError(f"width {self.width} is not a multiple of heads {self.heads}")


class Block(nn.Module):
    """Attention and a two-layer perceptron, each behind its own norm."""

    def __init__(self, config: TinyConfig) -> None:
        super().__init__()
        width = config.width
        self.heads = config.heads
        self.attention_norm = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.attention_out = nn.Linear(width, width, bias=False)
        self.mlp_norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width, bias=False)
        self.down = nn.Linear(4 * width, width, bias=False)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        batch, length, width = hidden.shape
        qkv = self.qkv(self.attention_norm(hidden))
        query, key, value = qkv.view(batch, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        mixed = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        hidden = hidden + self.attention_out(mixed.transpose(1, 2).reshape(batch, length, width))
        change: torch.Tensor = self.down(functional.gelu(self.up(self.mlp_norm(hidden))))
        return hidden + change


class TinyModel(nn.Module):
    """Decoder-only transformer; every weight is a parameter, none is tied, none is a buffer."""

    def __init__(self, config: TinyConfig) -> None:
        super().__init__()
        self.config = config
        # The caller's random state is not ours to move.
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(config.seed)
            self.tokens = nn.Embedding(config.vocabulary, config.width)
            self.positions = nn.Embedding(config.context, config.width)
            self.blocks = nn.ModuleList(Block(config) for _ in range(config.layers))
            self.norm = nn.LayerNorm(config.width)
            self.head = nn.Linear(config.width, config.vocabulary, bias=False)
            self._initialise()

    def _initialise(self) -> None:
        for name, parameter in self.named_parameters():
            if parameter.dim() == 2:
                into_residual = name.endswith(("attention_out.weight", "down.weight"))
                scale = (2 * self.config.layers) ** -0.5 if into_residual else 1.0
                fan_in = parameter.shape[1]
                std = 0.3 if "tokens" in name or "positions" in name else fan_in**-0.5
                nn.init.normal_(parameter, std=std * scale)
        # A head near zero starts as the uniform policy, which explores every answer.
        nn.init.normal_(self.head.weight, std=0.01)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Logits ``[batch, length, vocabulary]`` of int64 ids ``[batch, length]``."""
        hidden = self.tokens(tokens) + self.positions.weight[: tokens.shape[1]]
        for block in self.blocks:
            hidden = block(hidden)
        logits: torch.Tensor = self.head(self.norm(hidden))
        return logits

    @torch.no_grad()
    def generate(
        self,
        prompts: torch.Tensor,
        new_tokens: int,
        *,
        temperature: float = 1.0,
        generator: torch.Generator | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Sample `new_tokens` tokens after each prompt.

        Args:
            prompts: int64 ids ``[batch, length]``, all of one length.
            new_tokens: Answer length; prompt and answer must fit the context.
            temperature: Divides the logits; 0 takes the likeliest token.
            generator: Source of randomness; equal seeds give equal answers.

        Returns:
            Ids, and their log-probabilities at this temperature (at 1 when it is 0), both
            ``[batch, new_tokens]``.
        """
        start = prompts.shape[1]
        if start + new_tokens > self.config.context:
            raise ValueError(
                f"{start} prompt + {new_tokens} new tokens exceed the context of "
                f"{self.config.context}"
            )
        sequence = prompts
        logprobs = []
        for _ in range(new_tokens):
            logits = self(sequence)[:, -1]
            scores = functional.log_softmax(logits / (temperature or 1.0), dim=-1)
            if temperature:
                chosen = torch.multinomial(scores.exp(), 1, generator=generator)
            else:
                chosen = scores.argmax(dim=-1, keepdim=True)
            logprobs.append(scores.gather(1, chosen))
            sequence = torch.cat((sequence, chosen), dim=1)
        return sequence[:, start:], torch.cat(logprobs, dim=1)
