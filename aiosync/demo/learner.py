"""Policy gradient on sampled answers, with a group baseline and a clipped importance ratio."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch.nn import functional

from aiosync.demo.model import TinyConfig, TinyModel
from aiosync.demo.task import SortTask


@dataclass(frozen=True, kw_only=True)
class LearnerConfig:
    """What a `Learner` trains on, and how.

    Attributes:
        prompts: Different prompts per step.
        group: Answers sampled for each prompt; their mean is the baseline.
        minibatches: Optimiser steps per learning step; each answer is used once.
        steady_steps: Steps at the full learning rate; from there on it falls as 1/step, since a
            good policy is easily spoilt by old answers.
        clip: How far a token's probability ratio may leave 1 before its gradient stops.
    """

    task: SortTask = field(default_factory=SortTask)
    width: int = 96
    heads: int = 4
    layers: int = 2
    prompts: int = 64
    group: int = 8
    minibatches: int = 4
    learning_rate: float = 2e-3
    steady_steps: int = 10
    clip: float = 0.2
    entropy: float = 0.003
    max_grad_norm: float = 1.0
    temperature: float = 1.0

    def model(self, seed: int) -> TinyConfig:
        """The policy's configuration: what an inference worker needs to build the same model."""
        return TinyConfig(
            vocabulary=self.task.vocabulary,
            context=self.task.context,
            width=self.width,
            heads=self.heads,
            layers=self.layers,
            seed=seed,
        )


@dataclass(frozen=True, kw_only=True)
class Rollouts:
    """Sampled answers.

    Attributes:
        prompts: int64 ``[answers, prompt length]``; equal prompts form a group, in any order.
        tokens: int64 ``[answers, answer length]``.
        logprobs: float ``[answers, answer length]``: of each token under the weights that
            sampled it, which may be older than the learner's.
    """

    prompts: torch.Tensor
    tokens: torch.Tensor
    logprobs: torch.Tensor


@dataclass(frozen=True, kw_only=True)
class LearnStats:
    """One step's outcome.

    Attributes:
        reward: Mean reward of the answers.
        solved: Share of answers that are right throughout.
        entropy: Mean entropy of the policy's next token, in nats.
        clipped: Share of tokens whose gradient the ratio clip stopped.
        grad_norm: Mean norm of the gradients before clipping.
    """

    reward: float
    solved: float
    entropy: float
    clipped: float
    grad_norm: float


class Learner:
    """Holds the policy; knows nothing of where answers come from."""

    def __init__(self, config: LearnerConfig | None = None, seed: int = 0) -> None:
        self.config = config or LearnerConfig()
        self.task = self.config.task
        self.model = TinyModel(self.config.model(seed))
        self.step = 0
        self._generator = torch.Generator().manual_seed(seed)
        self._optimizer = torch.optim.Adam(
            self.model.parameters(), lr=self.config.learning_rate, betas=(0.9, 0.95)
        )

    def make_prompts(self) -> torch.Tensor:
        """The next step's prompts, each repeated for its group: ``[prompts * group, length]``."""
        prompts = self.task.prompts(self.config.prompts, self._generator)
        return prompts.repeat_interleave(self.config.group, dim=0)

    def learn(self, rollouts: Rollouts) -> LearnStats:
        """Improve the policy in place by one step.

        Raises:
            ValueError: The tensors' shapes do not belong together.
        """
        self._check(rollouts)
        credit = self.task.credit(rollouts.prompts, rollouts.tokens)
        advantages = group_advantages(rollouts.prompts, credit)
        for group in self._optimizer.param_groups:
            group["lr"] = self.config.learning_rate / max(1.0, self.step / self.config.steady_steps)
        count = len(rollouts.prompts)
        order = torch.randperm(count, generator=self._generator)
        updates = [
            self._update(rollouts, advantages, chosen)
            for chosen in torch.tensor_split(order, min(count, self.config.minibatches))
        ]
        self.step += 1
        entropy, clipped, grad_norm = torch.stack(updates).mean(dim=0).tolist()
        return LearnStats(
            reward=credit.mean().item(),
            solved=credit.amin(dim=1).mean().item(),
            entropy=entropy,
            clipped=clipped,
            grad_norm=grad_norm,
        )

    def _check(self, rollouts: Rollouts) -> None:
        answers = (len(rollouts.prompts), self.task.count)
        shapes = {
            "prompts": (rollouts.prompts, (len(rollouts.prompts), self.task.prompt_length)),
            "tokens": (rollouts.tokens, answers),
            "logprobs": (rollouts.logprobs, answers),
        }
        for name, (tensor, shape) in shapes.items():
            if tuple(tensor.shape) != shape or not len(tensor):
                raise ValueError(f"rollouts.{name} has shape {tuple(tensor.shape)}, not {shape}")

    def _update(
        self, rollouts: Rollouts, advantages: torch.Tensor, chosen: torch.Tensor
    ) -> torch.Tensor:
        tokens = rollouts.tokens[chosen]
        sequence = torch.cat((rollouts.prompts[chosen], tokens[:, :-1]), dim=1)
        logits = self.model(sequence)[:, -self.task.count :] / self.config.temperature
        scores = functional.log_softmax(logits, dim=-1)
        logprobs = scores.gather(2, tokens.unsqueeze(2)).squeeze(2)
        ratio = (logprobs - rollouts.logprobs[chosen]).exp()
        advantage = advantages[chosen]
        bounded = ratio.clamp(1 - self.config.clip, 1 + self.config.clip)
        gain = torch.minimum(ratio * advantage, bounded * advantage)
        entropy = -(scores.exp() * scores).sum(dim=2).mean()
        loss = -gain.mean() - self.config.entropy * entropy

        self._optimizer.zero_grad(set_to_none=True)
        loss.backward()  # type: ignore[no-untyped-call]  # torch leaves it untyped
        norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.config.max_grad_norm)
        self._optimizer.step()
        clipped = (gain < ratio * advantage).float().mean()
        return torch.stack((entropy, clipped, norm)).detach()


def group_advantages(prompts: torch.Tensor, credit: torch.Tensor) -> torch.Tensor:
    """How much better each token did than its group's mean at that place, in units of spread.

    A token's credit depends on the prompt and its place alone, so each place has its own
    baseline: the gradient's noise is a fraction of that of one reward for a whole answer.
    """
    _, groups = torch.unique(prompts, dim=0, return_inverse=True)
    sizes = torch.bincount(groups).unsqueeze(1).to(credit.dtype)
    sums = torch.zeros(len(sizes), credit.shape[1], dtype=credit.dtype)
    means = sums.index_add(0, groups, credit) / sizes
    centred = credit - means[groups]
    return centred / (centred.pow(2).mean().sqrt() + 1e-6)
