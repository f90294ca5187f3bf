"""Bars of what was measured, as SVG: ours beside raw, a pair for each record of one unit."""

from __future__ import annotations

import json
from html import escape
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

_WIDTH, _LABELS, _BAR, _GAP, _SIZE = 900, 380, 12, 14, 12
_COLOURS = {"ours": "#2563eb", "raw": "#9ca3af"}


def plot(lines: Iterable[str], *, title: str) -> str:
    """An SVG of the records in these JSON lines; those in seconds say less, others more, is better.

    Records of different units have scales of their own.
    """
    records = [json.loads(line) for line in lines if line.strip()]
    units = sorted({str(record["unit"]) for record in records})
    parts, at = [_text(10, 22, title, size=16)], 44
    for unit in units:
        chosen = [record for record in records if record["unit"] == unit]
        parts.append(_text(10, at, f"{unit}; blue: ours, grey: raw"))
        at += 10
        for record in chosen:
            parts += _pair(record, _scale(chosen), at)
            at += 2 * _BAR + _GAP
        at += 30
    body = "\n".join(parts)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{_WIDTH}" height="{at}" '
        f'font-family="sans-serif">\n{body}\n</svg>\n'
    )


def _scale(records: Sequence[dict[str, Any]]) -> float:
    largest = max(max(record["ours"], record["raw"]) for record in records)
    return float((_WIDTH - _LABELS - 130) / (largest or 1))


def _pair(record: dict[str, Any], scale: float, at: int) -> list[str]:
    payload = str(record["payload"]).partition(":")[0]
    parts = [_text(10, at + _BAR + 4, f"{record['name']}: {record['variant']}, {payload}")]
    for row, side in enumerate(("ours", "raw")):
        top, value = at + row * _BAR, float(record[side])
        width = max(value * scale, 1.0)
        parts.append(
            f'<rect x="{_LABELS}" y="{top}" width="{width:.1f}" height="{_BAR - 2}" '
            f'fill="{_COLOURS[side]}"/>'
        )
        said = f"{value:g}" + (f"  ({record['ratio']:g} of raw)" if side == "ours" else "")
        parts.append(_text(_LABELS + width + 6, top + _BAR - 3, said))
    return parts


def _text(x: float, y: float, text: str, *, size: int = _SIZE) -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" font-size="{size}">{escape(text)}</text>'
