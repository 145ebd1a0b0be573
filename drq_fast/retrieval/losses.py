"""The losses of the features: the adaptive margin loss over word vectors and the triplet loss.

Labels are bool [N, C], one column per class; two images are similar if they share at least one. An image without labels
is similar to no other and adds nothing. If a batch has no pairs or triplets, loss and gradients are 0.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from .. import checks
from .settings import MINING

_NO_DIRECTION = 1e-6  # a z of at most this length is not normalised, so that gradients stay bounded


class Triplets(NamedTuple):
    """Row numbers of a batch, [T] each: the positive shares a label with the anchor, the negative shares none."""

    anchor: Tensor
    positive: Tensor
    negative: Tensor


def adaptive_margin_loss(z: Tensor, labels: Tensor, words: Tensor) -> Tensor:
    """l_s, the mean over images z [N, E] with labels [N, C] bool and word vectors [C, E].

    sum over i in the labels and j not in them of max(0, delta_ij - cos(v_i, z) + cos(v_j, z)), where the margin
    delta_ij = 1 - cos(v_i, v_j) is larger for classes with less similar word vectors.
    """
    check_labels("adaptive_margin_loss", labels, len(z), z.device)
    if words.shape != (labels.shape[1], z.shape[1]):
        expected = f"[{labels.shape[1]}, {z.shape[1]}], one row per class and as wide as z"
        checks.fail("adaptive_margin_loss", "words", expected, checks.shape_of(words))
    with torch.autocast(z.device.type, enabled=False):
        z = _full(z)
        v = F.normalize(words.to(z.dtype), dim=1)
        length = _length(z)[:, None]
        cosine = z / torch.where(length > _NO_DIRECTION, length, 1) @ v.T  # [N, C]
        delta = 1 - v @ v.T  # [C, C]
        image, i = labels.nonzero(as_tuple=True)  # [P]: every label of every image
        violation = (delta[i] - cosine[image, i][:, None] + cosine[image]).clamp_min(0)  # [P, C]
        return (violation * ~labels[image]).sum() / max(len(z), 1)


def triplet_loss(anchor: Tensor, positive: Tensor, negative: Tensor, margin: float) -> Tensor:
    """l_t, the mean over triplets of features [T, D]: max(0, |anchor - positive| - |anchor - negative| + margin)."""
    if not anchor.shape == positive.shape == negative.shape:
        shapes = ", ".join(checks.shape_of(x) for x in (anchor, positive, negative))
        checks.fail("triplet_loss", "anchor, positive and negative", "of one shape", shapes)
    anchor, positive, negative = _full(anchor), _full(positive), _full(negative)
    return _hinge(_length(anchor - positive) - _length(anchor - negative), margin)


def batch_triplet_loss(
    x: Tensor, labels: Tensor, margin: float, mining: str = "semi_hard", generator: torch.Generator | None = None
) -> Tensor:
    """l_t over triplets mined in the batch x [N, D] with labels [N, C] bool."""
    with torch.autocast(x.device.type, enabled=False):
        distance = distances(_full(x))
        anchor, positive, negative = mine(distance.detach(), labels, mining, generator)
        return _hinge(distance[anchor, positive] - distance[anchor, negative], margin)


def mine(distance: Tensor, labels: Tensor, mining: str, generator: torch.Generator | None = None) -> Triplets:
    """Triplets of a batch with distances [N, N] and labels [N, C] bool.

    "semi_hard": every pair of anchor and positive with the nearest negative that is farther than the positive, or the
    farthest negative if there is none. "random": one positive and one negative per anchor.
    """
    checks.choice("mine", "mining", mining, MINING)
    check_labels("mine", labels, len(distance), distance.device)
    alike = similar(labels, labels)
    positive = alike & ~torch.eye(len(alike), dtype=torch.bool, device=alike.device)
    negative = ~alike & labels.any(dim=1, keepdim=True) & labels.any(dim=1)
    if mining == "random":
        anchor = (positive.any(dim=1) & negative.any(dim=1)).nonzero().squeeze(1)
        return Triplets(anchor, *(_draw(chosen[anchor], generator) for chosen in (positive, negative)))
    anchor, near = (positive & negative.any(dim=1, keepdim=True)).nonzero(as_tuple=True)
    ordered, order = torch.where(negative, distance, torch.inf).sort(dim=1)
    place = torch.searchsorted(ordered, distance, right=True)[anchor, near]
    farthest = negative.sum(dim=1)[anchor] - 1
    return Triplets(anchor, near, order[anchor, torch.minimum(place, farthest)])


def distances(x: Tensor) -> Tensor:
    """Euclidean distances [N, N] of x [N, D]; the gradient of a distance of 0 is 0."""
    x = x - x.detach().mean(dim=0)  # avoids cancellation for vectors far from 0
    squared = (x * x).sum(dim=1)
    return _root((squared[:, None] + squared - 2 * x @ x.T).clamp_min(0).fill_diagonal_(0))


def similar(labels: Tensor, others: Tensor) -> Tensor:
    """bool [N, L]: whether row n of labels [N, C] and row l of others [L, C] share a label."""
    return (labels.float() @ others.float().T) > 0


def check_labels(op: str, labels: Tensor, count: int, device: torch.device) -> None:
    """Bool [count, C] on `device`."""
    checks.tensor(op, "labels", labels)
    if labels.dtype != torch.bool or labels.ndim != 2 or len(labels) != count:
        checks.fail(op, "labels", f"bool [{count}, C]", f"{labels.dtype} {checks.shape_of(labels)}")
    if labels.device != device:
        checks.fail(op, "labels", f"on {device}, like the features", f"a tensor on {labels.device}")


def _draw(allowed: Tensor, generator: torch.Generator | None) -> Tensor:
    """[T]: one of the allowed columns of each row, drawn uniformly."""
    if len(allowed) == 0:
        return allowed.new_empty(0, dtype=torch.int64)
    weights = allowed.float().cpu()  # where the generator is, so that every rank draws the same
    return torch.multinomial(weights, 1, generator=generator).squeeze(1).to(allowed.device)


def _hinge(gap: Tensor, margin: float) -> Tensor:
    """The mean of max(0, gap + margin), or 0 if gap is empty."""
    return (gap + margin).clamp_min(0).sum() / max(len(gap), 1)


def _full(x: Tensor) -> Tensor:
    """x in at least float32."""
    return x if x.dtype == torch.float64 else x.float()


def _length(x: Tensor) -> Tensor:
    return _root((x * x).sum(dim=-1))


def _root(squared: Tensor) -> Tensor:
    """The square root with a gradient of 0 at 0."""
    positive = squared > 0
    return torch.where(positive, squared, 1).sqrt() * positive
