"""The real model that other tests send: it loads offline, and its embeddings mean something."""

from __future__ import annotations

import sys

import torch
from real_model import blank, embed, load, model_dir, weights


def test_trained_weights_know_what_blank_ones_do_not():
    folder = model_dir()
    model = load(folder)
    assert sum(parameter.numel() for parameter in model.parameters()) > 20_000_000
    cat = embed(model, "The cat sits outside")
    torch.testing.assert_close(cat.norm(), torch.tensor(1.0))
    near = cat @ embed(model, "A cat is sitting in the garden")
    far = cat @ embed(model, "The stock market fell sharply")
    assert near > far + 0.4
    assert "sentence_transformers" not in sys.modules

    other = blank(folder)
    trained, random = model.state_dict(), other.state_dict()
    assert trained.keys() == random.keys() >= weights(folder).keys() - {"embeddings.position_ids"}
    assert not torch.equal(embed(other, "The cat sits outside"), cat)
    other.load_state_dict(trained)
    assert torch.equal(embed(other, "The cat sits outside"), cat)
