"""The demonstration's work: learn, sync and sample at the same time, then compare bits."""

from __future__ import annotations

import asyncio
import statistics
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias, final

import torch

from aiosync.demo import checkpoint
from aiosync.demo.lag import LagSampler, percentile_ms
from aiosync.demo.learner import Rollouts
from aiosync.demo.messages import GenerateRequest
from aiosync.demo.outcome import Outcome, Row, Summary
from aiosync.demo.replicas import generate
from aiosync.demo.worker import logit_bits

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence

    from aiosync.demo.learner import Learner
    from aiosync.demo.outcome import Options
    from aiosync.demo.replicas import Replica
    from aiosync.demo.view import View
    from aiosync.report import Report
    from aiosync.trainer import TrainerWeightTransferEngine
    from transports.lane import Lane

_PER_REQUEST = 32
# Keep the seeds of all requests of all runs apart.
_STEPS, _REQUESTS = 1 << 20, 1 << 10
_FLOOR_STEPS = 8
_ENDS = 5
_JUDGED_FROM = 20
_LEAST_GAIN = 0.2
_FIXED_PROMPTS = 16


@dataclass(frozen=True)
class _Batch:
    rollouts: Rollouts
    versions: list[int]


_Publish: TypeAlias = "Callable[[int, float, list[int]], Awaitable[None]]"


@final
class Training:
    """One run of the learner against workers that serve already."""

    def __init__(
        self,
        options: Options,
        view: View,
        *,
        engine: TrainerWeightTransferEngine[Any],
        fleet: Sequence[Replica],
        lane: Lane,
        learner: Learner,
    ) -> None:
        self._options = options
        self._view = view
        self._engine = engine
        self._fleet = fleet
        self._lane = lane
        self._learner = learner
        self._lag = LagSampler()
        self._seen = 0
        self._rewards: list[float] = []
        self._reports: list[Report] = []
        self._failures: list[str] = []
        self._fixed = learner.task.prompts(_FIXED_PROMPTS, torch.Generator().manual_seed(0))

    async def run(self, extra: dict[str, torch.Tensor], backend: str) -> Outcome:
        """All steps, the checks, and the lag's floor.

        Args:
            extra: Tensors that travel beside the policy.
            backend: Its name, for the summary.
        """
        self._view.note("training")
        async with self._lag.running():
            await self._sync(0, None, [])
            batch = await self._sample(1, await self._prompts())
            for step in range(1, self._options.rounds):
                batch = await self._step(step, batch, self._sync)
            await self._last_step(batch)
        await self._check_checkpoint(extra)
        floor = await self._measure_floor(extra)
        self._view.note("done")
        return self._sum_up(backend, floor)

    async def _step(self, step: int, batch: _Batch, publish: _Publish) -> _Batch:
        """Learn from `batch` and publish, while the workers sample the next one."""
        # Taken before the learner has the lane, so that sampling need not wait for it.
        prompts = await self._prompts()
        ahead = asyncio.create_task(self._sample(step + 1, prompts))
        try:
            reward = await self._learn(batch)
            await publish(step, reward, batch.versions)
            return await ahead
        finally:
            ahead.cancel()
            await asyncio.wait([ahead])

    async def _last_step(self, batch: _Batch) -> None:
        reward = await self._learn(batch)
        self._failures += [
            f"{name} computed the trainer's logits already before the last sync"
            for name, is_equal in await self._compare()
            if is_equal
        ]
        last = self._options.rounds
        await self._sync(last, reward, batch.versions)
        self._failures += [
            f"{name} does not compute the trainer's logits after the last sync"
            for name, is_equal in await self._compare()
            if not is_equal
        ]

    async def _learn(self, batch: _Batch) -> float:
        return (await self._lane.run(self._learner.learn, batch.rollouts)).reward

    async def _sync(self, version: int, reward: float | None, sampled_by: list[int]) -> None:
        report = await self._engine.send_weights(version=version)
        self._reports.append(report)
        if reward is not None:
            self._rewards.append(reward)
        if not report.verified:
            self._failures.append(f"no digest was compared for version {version}")
        lag = self._lag.samples[self._seen :]
        self._seen += len(lag)
        row = Row(
            version=version,
            nbytes=report.nbytes,
            seconds=report.seconds,
            lag_ms=percentile_ms(lag, 99),
            verified=report.verified,
            reward=reward,
            sampled_by=sampled_by,
        )
        self._view.round(row)

    async def _prompts(self) -> torch.Tensor:
        return await self._lane.run(self._learner.make_prompts)

    async def _sample(self, step: int, prompts: torch.Tensor) -> _Batch:
        """Answers from all workers; the versions that sampled them are kept."""
        config = self._learner.config
        requests = [
            GenerateRequest(
                prompts=piece.tolist(),
                new_tokens=config.task.count,
                temperature=config.temperature,
                seed=(self._options.seed * _STEPS + step) * _REQUESTS + index,
            )
            for index, piece in enumerate(torch.split(prompts, _PER_REQUEST))
        ]
        answers = await generate(self._fleet, requests)
        rollouts = Rollouts(
            prompts=prompts,
            tokens=torch.tensor([row for answer in answers for row in answer.tokens]),
            logprobs=torch.tensor([row for answer in answers for row in answer.logprobs]),
        )
        return _Batch(rollouts, sorted({int(answer.version or 0) for answer in answers}))

    async def _compare(self) -> list[tuple[str, bool]]:
        """For each worker, whether its logits are the trainer's, bit by bit."""
        mine = await self._lane.run(logit_bits, self._learner.model, self._fixed)
        tokens = self._fixed.tolist()
        theirs = await asyncio.gather(*(replica.logits(tokens) for replica in self._fleet))
        return [
            (replica.name, reply.bits == mine)
            for replica, reply in zip(self._fleet, theirs, strict=True)
        ]

    async def _check_checkpoint(self, extra: dict[str, torch.Tensor]) -> None:
        if not extra:
            return
        self._view.note("comparing every tensor of the checkpoint")
        mine = await self._lane.run(checkpoint.fingerprints, extra)
        for replica in self._fleet:
            theirs = (await replica.fingerprints()).sha256
            wrong = sorted(name for name in mine | theirs if mine.get(name) != theirs.get(name))
            if wrong:
                self._failures.append(
                    f"{replica.name} holds other bytes than the checkpoint in {len(wrong)} of"
                    f" {len(mine)} tensors, {wrong[0]} among them"
                )

    async def _measure_floor(self, extra: dict[str, torch.Tensor]) -> list[float]:
        """The lag of the same work, with torch's own copies of the bytes instead of syncs."""
        self._view.note("measuring the event loop's lag without syncs")
        tensors = [*self._learner.model.parameters(), *extra.values()]
        spare = [torch.empty_like(tensor) for tensor in tensors]

        async def copy(step: int, reward: float, versions: list[int]) -> None:
            del step, reward, versions
            await self._lane.run(_copy, tensors, spare)

        first = self._options.rounds + 1
        batch = await self._sample(first, await self._prompts())
        async with LagSampler().running() as lag:
            for step in range(first, first + min(_FLOOR_STEPS, self._options.rounds)):
                batch = await self._step(step, batch, copy)
        return lag.samples

    def _sum_up(self, backend: str, floor: list[float]) -> Outcome:
        verified = not self._failures
        first = statistics.fmean(self._rewards[:_ENDS])
        last = statistics.fmean(self._rewards[-_ENDS:])
        if self._options.rounds >= _JUDGED_FROM and last - first < _LEAST_GAIN:
            self._failures.append(f"the reward went from {first:.2f} to {last:.2f} only")
        totals = [report.seconds["total"] for report in self._reports[1:]]
        summary = Summary(
            rounds=self._options.rounds,
            workers=len(self._fleet),
            backend=backend,
            verified=verified,
            bytes_per_round=self._reports[-1].nbytes,
            round_ms_median=round(statistics.median(totals) * 1000, 3),
            loop_lag_ms_p99=round(percentile_ms(self._lag.samples, 99), 3),
            loop_lag_floor_ms_p99=round(percentile_ms(floor, 99), 3),
            reward_first=round(first, 4),
            reward_last=round(last, 4),
        )
        return Outcome(summary=summary, failures=self._failures)


@torch.no_grad()
def _copy(tensors: Sequence[torch.Tensor], spare: Sequence[torch.Tensor]) -> None:
    for tensor, copy in zip(tensors, spare, strict=True):
        copy.copy_(tensor)
