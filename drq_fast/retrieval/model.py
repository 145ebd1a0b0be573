"""The paper's network: backbone, head (fc8 and fc9) and recurrent quantizer; `ablation` selects a variant."""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import Tensor, nn

from .. import checks
from ..quantizer import RecurrentQuantizer
from .backbones import Features, Head
from .settings import ABLATIONS


class ModelOutput(NamedTuple):
    """Features x [N, D] and z [N, E] or None; error: the quantizer's loss, 0 if no level ran."""

    x: Tensor
    z: Tensor | None
    error: Tensor


class Model(nn.Module):
    """Maps batches to features x [N, dim] and quantizes them.

    backbone: a module with an attribute `dim`. words [C, E]: a vector per class; fc9 has width E. dim: of x; in
    ablations with fc9 alone it is E, in those without a head that of the backbone. Further arguments are passed to the
    quantizer.

    >>> model = Model(EfficientNetLite0(), words)
    """

    words: Tensor

    def __init__(
        self,
        backbone: nn.Module,
        words: Tensor,
        *,
        dim: int = 2048,
        codewords: int = 256,
        levels: int = 4,
        ablation: str = "none",
        activation: str = "tanh",
        **quantizer: Any,
    ) -> None:
        super().__init__()
        checks.choice("Model", "ablation", ablation, tuple(ABLATIONS))
        checks.floating("Model", "words", words)
        if words.ndim != 2 or 0 in words.shape:
            checks.fail("Model", "words", "[C, E], a vector per class", checks.shape_of(words))
        self.ablation, self.setting, self.backbone = ablation, ABLATIONS[ablation], backbone
        self.register_buffer("words", words.float().clone())
        width, E = checks.integer("Model", "backbone.dim", getattr(backbone, "dim", None), 1), words.shape[1]
        self.head: Head | None = None
        if self.setting.fc8 or self.setting.fc9:
            fc9 = E if self.setting.fc9 else 0
            fc8 = checks.integer("Model", "dim", dim, fc9 + 1) - fc9 if self.setting.fc8 else 0
            self.head = Head(width, fc8, fc9, activation)
            width = fc8 + fc9
        self.quantizer = RecurrentQuantizer(
            width, codewords, levels, loss="paper", weights=self.setting.errors, **quantizer
        )

    def features(self, inputs: Tensor) -> Features:
        """A batch for the backbone -> x [N, dim] and z [N, E] or None."""
        raw = self.backbone(inputs)
        return Features(raw, None) if self.head is None else self.head(raw)

    def forward(self, inputs: Tensor, levels: int = 0, detach: bool = False) -> ModelOutput:
        """Features and the error of the first `levels` levels, whose gradient `detach` keeps from the features."""
        x, z = self.features(inputs)
        if levels == 0:
            return ModelOutput(x, z, x.new_zeros(()))
        error = self.quantizer(x.detach() if detach else x, levels=levels, reconstruct=False).loss
        return ModelOutput(x, z, error)
