"""``aiosync demo``: its options, its exit codes, and what it does with signals."""

from __future__ import annotations

import sys
from pathlib import Path

import click

from aiosync.factory import available_backends

_WITHIN_ONE_PROCESS = {"loopback"}


def _backends() -> list[str]:
    known = available_backends()
    both = set(known["worker"]) & set(known["trainer"])
    return ["auto", *sorted(both - _WITHIN_ONE_PROCESS)]


@click.command()
@click.option(
    "--backend",
    type=click.Choice(_backends()),
    default="auto",
    show_default=True,
    help="How the bytes move.",
)
@click.option(
    "--rounds",
    type=click.IntRange(min=1),
    default=36,
    show_default=True,
    help="Training steps, each with a sync. From 20 on, the reward has to rise by 0.2.",
)
@click.option(
    "--workers",
    type=click.IntRange(min=1, max=64),
    default=1,
    show_default=True,
    help="Inference processes.",
)
@click.option(
    "--model",
    type=click.Path(exists=True, file_okay=False, path_type=Path),
    help="Folder with *.safetensors. Its tensors are sent along in every round; the workers "
    "know their names, shapes and dtypes only, and at the end the SHA-256 of every tensor in "
    "every worker is compared with the file's.",
)
@click.option("--seed", type=click.IntRange(min=0, max=2**31), default=0, show_default=True)
@click.option(
    "--json", "as_json", is_flag=True, help="Print one JSON object; progress goes to stderr."
)
def demo(
    backend: str, rounds: int, workers: int, model: Path | None, seed: int, as_json: bool
) -> None:
    """Train a small model while separate inference processes serve it.

    A policy learns by reinforcement to sort digits. Worker processes sample its answers over
    HTTP while this process trains, and after every step they get the new weights. At the end,
    trainer and workers must compute bit-equal logits, which differed before the last sync.

    Exit codes: 0, or 1 if something was not as promised, or 130 after Ctrl-C.
    """
    try:
        # Here: asking for help must not wait for torch.
        from aiosync.demo.execute import execute
        from aiosync.demo.outcome import Options

        options = Options(backend=backend, rounds=rounds, workers=workers, model=model, seed=seed)
        code = execute(options, as_json=as_json)
    except KeyboardInterrupt:
        code = 130
    sys.exit(code)
