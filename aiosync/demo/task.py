"""Sort a few digits: a task whose answers code can check."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True, kw_only=True)
class SortTask:
    """Prompts are ``count`` digits and a separator; the answer is the digits in order.

    Attributes:
        digits: Digits run from 0 to ``digits - 1``; their ids are their values.
        count: Digits per prompt, and tokens per answer.
    """

    digits: int = 6
    count: int = 4

    @property
    def separator(self) -> int:
        """Id of the token that ends a prompt."""
        return self.digits

    @property
    def vocabulary(self) -> int:
        """Number of ids: the digits and the separator."""
        return self.digits + 1

    @property
    def prompt_length(self) -> int:
        """Tokens per prompt."""
        return self.count + 1

    @property
    def context(self) -> int:
        """Tokens of a prompt with its answer."""
        return self.prompt_length + self.count

    def prompts(self, batch: int, generator: torch.Generator) -> torch.Tensor:
        """Random prompts, int64 ``[batch, prompt_length]``."""
        digits = torch.randint(self.digits, (batch, self.count), generator=generator)
        return torch.cat((digits, torch.full((batch, 1), self.separator)), dim=1)

    def solve(self, prompts: torch.Tensor) -> torch.Tensor:
        """The right answers, int64 ``[batch, count]``."""
        return prompts[:, : self.count].sort(dim=1).values

    def credit(self, prompts: torch.Tensor, answers: torch.Tensor) -> torch.Tensor:
        """1.0 for each answer token that is right and 0.0 elsewhere, ``[batch, count]``."""
        return (answers == self.solve(prompts)).float()

    def reward(self, prompts: torch.Tensor, answers: torch.Tensor) -> torch.Tensor:
        """Share of right tokens, ``[batch]`` in [0, 1]; 1 only for the sorted digits."""
        return self.credit(prompts, answers).mean(dim=1)

    def show(self, prompt: torch.Tensor, answer: torch.Tensor) -> str:
        """One line for people, such as ``3 1 2 > 1 2 3``."""
        ids = [*prompt.tolist(), *answer.tolist()]
        return " ".join(">" if i == self.separator else str(i) for i in ids)
