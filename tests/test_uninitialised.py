"""Layers that have seen no data, and weights of other layers: what works, and what the errors say."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from drq_fast import Index, RecurrentQuantizer


def data(N: int = 600) -> torch.Tensor:
    return torch.randn(N, 6, generator=torch.Generator().manual_seed(0)) + 3


def test_a_validation_before_training_says_what_to_do():
    model = nn.Sequential(nn.Linear(6, 6), RecurrentQuantizer(6, 16, 3)).eval()
    with pytest.raises(
        RuntimeError,
        match=r"^forward: the layer has not seen data yet; call layer.initialise\(x\), train it or load its weights "
        r"first; Lightning validates before it trains: set num_sanity_val_steps=0\.$",
    ):
        model(data())


@pytest.mark.parametrize("update", ["ema", "gradient"])
@pytest.mark.parametrize("use_buffers", [False, True])
def test_an_averaged_model_made_before_training_works(update, use_buffers):
    model = nn.Sequential(nn.Linear(6, 6), RecurrentQuantizer(6, 16, 3, update=update))
    averaged = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9), use_buffers=use_buffers)
    plain = AveragedModel(model, use_buffers=use_buffers)  # an average of all
    with pytest.raises(RuntimeError, match=r"^forward: the layer has not seen data yet"):
        averaged.eval()(data())
    for _ in range(3):
        model(data())
        averaged.update_parameters(model)
        plain.update_parameters(model)
    layer, other = model[1], averaged.module[1]
    assert torch.equal(other.codebook, layer.codebook) == (not use_buffers or update == "gradient")
    assert averaged.train()(data()).codes.shape == (600, 3)
    assert torch.allclose(other.codebook, layer.codebook, atol=0.1)  # it was not initialised anew
    assert Index(other).codec.levels == 3


def test_a_state_dict_of_other_levels_is_refused(tmp_path):
    four, eight = RecurrentQuantizer(6, 16, 4), nn.Sequential(RecurrentQuantizer(6, 16, 8))
    four.initialise(data())
    before = eight[0].codebook.clone()
    state = {f"0.{name}": value for name, value in four.state_dict().items()}
    for strict in (True, False):
        with pytest.raises(ValueError, match=r"^load_state_dict: levels must be 8, as in this layer, got 4\.$"):
            eight.load_state_dict(state, strict=strict)
    assert torch.equal(eight[0].codebook, before)
    assert not eight[0].initialised
    del state["0._levels"]  # as in versions before 0.2.0
    eight.load_state_dict(state)
    assert torch.equal(eight[0].codebook, four.codebook)
    four.save(tmp_path / "a.drq")
    assert RecurrentQuantizer.load(tmp_path / "a.drq").levels == 4


def test_a_state_dict_of_other_codebooks_is_refused(tmp_path):
    one, four = RecurrentQuantizer(6, 64, 4), RecurrentQuantizer(6, 16, 4, codebooks=4)
    four.initialise(data())
    assert one.codebook.shape == four.codebook.shape
    with pytest.raises(ValueError, match=r"^load_state_dict: codebooks must be 1, as in this layer, got 4\.$"):
        one.load_state_dict(four.state_dict())
    assert not one.initialised
    one.initialise(data())
    with pytest.raises(ValueError, match=r"^load_state_dict: codebooks must be 4, as in this layer, got 1\.$"):
        four.load_state_dict(one.state_dict())
    again = RecurrentQuantizer(6, 16, 4, codebooks=4)
    again.load_state_dict(four.state_dict())
    again.load_state_dict({}, strict=False)
    assert torch.equal(again.codebook, four.codebook)
    four.save(tmp_path / "a.drq")
    assert torch.equal(RecurrentQuantizer.load(tmp_path / "a.drq").codebook, four.codebook)


def test_channels_that_are_not_last_get_a_hint():
    layer = RecurrentQuantizer(6, 16, 3)
    layer.initialise(data())
    said = r": x must be \[\.\.\., 6\], got \[2, 6, 4, 5\] \(x\.movedim\(1, -1\) moves channels last\)\.$"
    for call in (layer, layer.encode, layer.initialise):
        with pytest.raises(ValueError, match=said):
            call(torch.randn(2, 6, 4, 5))
    with pytest.raises(ValueError, match=r"^RecurrentQuantizer: x must be \[\.\.\., 6\], got \[6, 5\]\.$"):
        layer(torch.randn(6, 5))


@pytest.mark.parametrize(("options", "names"), [({}, set()), ({"update": "gradient"}, {"codebook", "w", "offset"})])
def test_what_an_optimiser_and_its_weight_decay_see(options, names):
    assert {name for name, _ in RecurrentQuantizer(6, 16, 3, **options).named_parameters()} == names
