"""Alternating measurements of two things, and the record that is printed about them."""

from __future__ import annotations

import statistics
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Mapping, Sequence

MIB = 1 << 20
GB = 1e9


@dataclass(frozen=True)
class Options:
    """How much is measured.

    Attributes:
        nbytes: Payload of the benchmarks that move one.
        repeat: Measurements of either side; medians are reported.
    """

    nbytes: int = 2 << 30
    repeat: int = 7


@dataclass(frozen=True)
class Pairs:
    """What `alternate` measured: values of the two sides, one of each per turn."""

    ours: list[float]
    raw: list[float]

    def ratios(self) -> list[float]:
        return [ours / raw for ours, raw in zip(self.ours, self.raw, strict=True)]


async def alternate(
    ours: Callable[[], Awaitable[float]], raw: Callable[[], Awaitable[float]], repeat: int
) -> Pairs:
    """Measure both `repeat` times, in turn.

    Who goes first changes each time, so that a machine that slows down or speeds up meanwhile
    favours neither.
    """
    pairs = Pairs([], [])
    for turn in range(repeat):
        sides = [(pairs.ours, ours), (pairs.raw, raw)]
        for values, measure in sides if turn % 2 == 0 else reversed(sides):
            values.append(await measure())
    return pairs


def record(
    name: str,
    pairs: Pairs,
    *,
    variant: str,
    payload: str,
    unit: str,
    target: str,
    **more: Any,
) -> dict[str, Any]:
    """One line of output: medians, the least and the greatest value, and what else is known."""
    ours, raw = statistics.median(pairs.ours), statistics.median(pairs.raw)
    return {
        "name": name,
        "variant": variant,
        "payload": payload,
        "ours": _short(ours),
        "raw": _short(raw),
        "unit": unit,
        "ratio": _short(ours / raw),
        "target": target,
        "repeat": len(pairs.ours),
        "ours_spread": spread(pairs.ours),
        "raw_spread": spread(pairs.raw),
        "ratio_spread": spread(pairs.ratios()),
        **more,
    }


def median(values: Sequence[float]) -> float:
    """The median, as it is printed."""
    return _short(statistics.median(values))


def medians(phases: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Of what several rounds' reports say of each phase's seconds."""
    return {name: median([phase[name] for phase in phases]) for name in phases[0]}


def spread(values: Sequence[float]) -> list[float]:
    """The least and the greatest, as they are printed."""
    return [_short(min(values)), _short(max(values))]


def percentile(values: Sequence[float], share: float) -> float:
    """The value that `share` of all values do not exceed."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(len(ordered) * share))]


def payload(nbytes: int, tensors: int) -> str:
    """How much in how many, for a reader."""
    amount = f"{nbytes / MIB:.0f} MiB" if nbytes >= MIB else f"{nbytes} bytes"
    return f"{amount} in {tensors} tensor{'' if tensors == 1 else 's'}"


def _short(value: float) -> float:
    return float(f"{value:.4g}")
