"""RecurrentQuantizer: the drop-in layer. M levels of residual quantization with one shared codebook."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple, NoReturn

import numpy as np
import torch
from torch import Tensor

from . import checks, files, functional, modes, objective, ranks
from . import codec as codecs
from . import fit as fitting
from .backends.types import Parameters
from .codec import Array, Codec
from .codes import bits
from .parameters import CODEBOOKS, LEVELS, LayerParameters, check_sizes
from .pretrained import Pretrained

# gamma = GAMMA_C / mean gap between the best and the second best distance (docs/math.md, section 2). By
# benchmarks/ablation_gamma.py, training with less than 4 pulls codewords together; more than 4 changes little.
GAMMA_C = 4.0
COMMITMENT = 1.0  # without a pull
ANCHOR = 0.02  # with a pull, which depends on no scale: the commitment then only keeps x from growing
PULL = 0.2  # of x to its approximation, relative to the gradient of `quantized`


class QuantizerOutput(NamedTuple):
    """quantized [..., D] (None with reconstruct=False), codes [..., levels] int64, loss to minimise: see `forward`."""

    quantized: Tensor | None
    codes: Tensor
    loss: Tensor


class RecurrentQuantizer(LayerParameters, Pretrained):
    """Quantizes vectors [..., dim] to codes [..., levels] in 0..codewords-1; any prefix of a code is a shorter code.

    The last axis is quantized: pass images [B, C, H, W] as x.movedim(1, -1).

    codebooks: 1 is the paper's one for all levels, a divisor of `levels` gives each group of neighbouring levels one of
    its own, `levels` is classical residual quantization. loss: "squared" is the mean squared error after each level;
    "paper" has the hard, soft and joint errors of the paper, with their `weights`. update: "ema" makes codebook, scale
    and offset running averages, which forward changes in training mode, "gradient" (always with loss="paper")
    parameters. pull: how strongly the gradient of `quantized` pulls x to its approximation in training mode, relative
    to its own length; only with update="ema", 0.2 by default. commitment: how strongly the squared loss does; by
    default 0.02, or 1 without a pull. scale: "shared" scales level m of a group by w**m with w learned, "per_level"
    learns a factor for each level but the first of a group. offset: learn a vector that is subtracted first.
    level_weights [levels]: of the levels in each error. init: "kmeans" initialises the codebook from the first training
    batch. gradient: of `quantized` with respect to x. joint belongs to the paper's loss, gamma to it and to
    gradient="soft". An optimiser sees parameters with update="gradient" only; keep weight decay from them, which would
    draw codewords, scale and offset to 0. See docs/design.md for details and docs/math.md for definitions.

    >>> layer = RecurrentQuantizer(dim=2048, codewords=256, levels=4)
    >>> quantized, codes, loss = layer(x)
    """

    def __init__(
        self,
        dim: int,
        codewords: int = 256,
        levels: int = 4,
        *,
        codebooks: int = 1,
        loss: str = "squared",
        commitment: float | None = None,
        pull: float | None = None,
        update: str | None = None,
        scale: str = "shared",
        offset: bool = True,
        gamma: float | None = None,
        joint: str = "gap",
        weights: Sequence[float] | None = None,
        level_weights: Sequence[float] | None = None,
        init: str = "kmeans",
        gradient: str = "straight_through",
    ) -> None:
        op = "RecurrentQuantizer"
        dim = checks.integer(op, "dim", dim, 1)
        codewords = checks.integer(op, "codewords", codewords, 2, checks.MAX_CODEWORDS)
        levels = checks.integer(op, "levels", levels, 1)
        groups = checks.groups(op, checks.integer(op, "codebooks", codebooks, 1), levels)
        checks.choice(op, "loss", loss, ("squared", "paper"))
        checks.choice(op, "scale", scale, ("shared", "per_level"))
        checks.choice(op, "joint", joint, ("gap", "mse"))
        checks.choice(op, "init", init, ("kmeans", "random"))
        if update is not None:
            checks.choice(op, "update", update, ("ema", "gradient"))
        checks.choice(op, "gradient", gradient, ("straight_through", "soft"))
        offset = checks.boolean(op, "offset", offset)
        if gamma is not None:
            checks.gamma(op, gamma)
        if loss == "squared" and (weights is not None or joint != "gap"):
            name, value = ("joint", joint) if weights is None else ("weights", weights)
            checks.fail(op, name, 'left out unless loss="paper"', repr(value))
        if loss == "paper" and commitment is not None:
            checks.fail(op, "commitment", 'left out unless loss="squared"', repr(commitment))
        if loss == "paper" and update == "ema":
            checks.fail(op, "update", '"gradient" unless loss="squared"', repr(update))
        update = update or ("ema" if loss == "squared" else "gradient")
        if pull is not None and update != "ema":
            checks.fail(op, "pull", 'left out unless update="ema"', repr(pull))
        options = {"free_scale": scale == "per_level", "offset": offset, "update": update}
        super().__init__(dim, codewords, levels, groups=groups, **options)  # type: ignore[arg-type]
        self.loss, self.joint, self.init, self.gradient = loss, joint, init, gradient
        self.pull = 0.0 if update != "ema" else checks.commitment(op, PULL if pull is None else pull, "pull")
        default = ANCHOR if self.pull else COMMITMENT
        self.commitment = checks.commitment(op, default if commitment is None else commitment)
        self.weights = checks.weights(op, (1.0, 1.0, 1.0) if weights is None else weights)
        self.level_weights = checks.level_weights(op, level_weights, levels)
        self.fixed_gamma = None if gamma is None else float(gamma)

        self.gamma: Tensor
        self.register_buffer("gamma", torch.tensor(1.0 if gamma is None else float(gamma)))
        # forward reads the Python bool; the buffer stores it in state_dict.
        self.initialised = init == "random" and not offset and gamma is not None
        self._initialised: Tensor
        self.register_buffer("_initialised", torch.tensor(int(self.initialised)))  # AveragedModel cannot average bools
        self._observed: Tensor  # how often each codeword was used in the codes given to `observe`
        self.register_buffer("_observed", torch.zeros(len(self.codebook), dtype=torch.int64))

    @property
    def bits(self) -> int:
        """Length of a full code in bits; `levels` parts of equal length make it up."""
        return bits(self.codewords, self.levels)

    def forward(
        self,
        x: Tensor,
        *,
        levels: int | Tensor | None = None,
        mask: Tensor | None = None,
        reduction: str = "mean",
        reconstruct: bool = True,
    ) -> QuantizerOutput:
        """x [..., dim] -> (quantized [..., dim], codes [..., levels] int64, loss scalar).

        quantized has the values of the decoded codes and the gradient chosen by `gradient`, plus, in training mode, the
        pull. levels: runs fewer levels; a tensor [...] has a number for each vector, codes being those of all levels.
        mask [...] bool: vectors that are False stay as they are, have code -1 and do not count in the loss. reduction:
        "row" gives the loss of every vector [...], "level" that of every level [levels]. reconstruct=False skips
        `quantized`, which is cheaper if only codes and loss are needed. The first forward in training mode initialises
        the layer from x (see `initialise`), and refuses NaN and infinity. Later ones do not: the loss is then NaN, and
        the running averages leave out vectors that are not finite.
        """
        op = "RecurrentQuantizer"
        checks.floating(op, "x", x, device=self.codebook.device)
        flat = checks.rows(op, "x", x, self.dim)
        checks.choice(op, "reduction", reduction, objective.REDUCTIONS[self.loss])
        L, lengths = checks.level_numbers(op, levels, self.levels, x.shape[:-1], x.device)
        counted = checks.row_mask(op, mask, x.shape[:-1], x.device)
        reconstruct = checks.boolean(op, "reconstruct", reconstruct)
        if self.level_weights is not None and not any(self.level_weights[:L]):
            checks.fail(op, "level_weights", f"above 0 somewhere in the first {L} levels", self.level_weights)
        if counted is not None:
            flat = flat.masked_fill(~counted[:, None], 0)
        if not self.initialised:
            self._initialise_in_forward(flat if counted is None else flat[counted])
        follows = self._follows()
        if follows:
            self._move()
        codec = self._as_codec() if self.levels == L else self._as_codec().part(slice(0, L))
        omega = None if self.level_weights is None else self.level_weights[:L]
        batch = objective.Batch(flat, lengths, counted)
        if self.loss == "squared":
            weight = 1.0 if self.pull else self.commitment
            errors, chosen = functional.squared_errors(
                flat, *codec.tensors()[:2], offset=self.offset, codebooks=codec.sizes, commitment=weight
            )
            if self.update == "ema":
                squares = torch.sub(errors, errors.detach(), alpha=weight / (1 + weight))
            if self.pull:  # the codec has no gradient
                errors = squares.detach() + self.commitment * squares
            loss = objective.squared(batch, errors, omega, reduction)
            if follows:
                weights = objective.level_weights(batch, omega, errors).expand_as(errors)
                self._follow(flat.detach(), chosen, squares.detach(), codec, weights)
        else:
            loss, chosen = objective.paper(batch, codec, self.gamma, self.weights, omega, self.joint, reduction)
        codes = chosen if counted is None else torch.where(counted[:, None], chosen, -1)
        codes = codes.reshape(*x.shape[:-1], L)
        loss = loss.reshape(x.shape[:-1]) if reduction == "row" else loss
        if not reconstruct:
            return QuantizerOutput(None, codes, loss)
        with torch.no_grad():
            hard = functional.decode_checked(chosen, codec, lengths=lengths).to(x.dtype)
        through = flat
        if self.gradient == "soft":
            through = functional.quantize(
                flat, codec.codebook, codec.scale, gamma=self.gamma, offset=self.offset, codebooks=codec.sizes
            ).soft
        if self.pull and self.training:
            distance = objective.distance(batch, squares, omega)
            quantized = objective.Pulled.apply(hard, through, distance, self.pull)
        else:
            quantized = hard + (through - through.detach())  # adds an exact zero that has the gradient
        quantized = quantized.reshape(x.shape)
        return QuantizerOutput(quantized if mask is None else torch.where(mask[..., None], quantized, x), codes, loss)

    def codec(self) -> Codec:
        """A frozen copy of the current parameters in float32, independent of later training.

        >>> index = drq_fast.Index(layer.codec())
        """
        self.require_initialised("codec")
        with torch.no_grad():
            weights = self.level_weights
            return Codec(self.codebook, self.scale, self.offset, codebooks=self.codebooks, level_weights=weights)

    @torch.no_grad()
    def encode(self, x: Array, beam: int = 1, levels: int | None = None) -> Array:
        """x [..., dim], torch or numpy -> codes [..., levels] in kind: uint8 for K <= 256, else int32.

        >>> codes = layer.encode(x, beam=16)
        """
        self.require_initialised("encode")
        return codecs.encode(x, self._as_codec(), beam, self.level_weights, levels)

    @torch.no_grad()
    def decode(self, codes: Array, levels: int | Tensor | None = None) -> Array:
        """codes [..., M], torch or numpy -> vectors [..., dim] in kind, from the first `levels` levels.

        levels: a tensor [...] has a number for each code.

        >>> x_hat = layer.decode(codes, levels=2)
        """
        self.require_initialised("decode")
        return codecs.decode(codes, self._as_codec(), levels)

    def embed(self, codes: Tensor) -> Tensor:
        """codes [..., L] -> what each level adds, [..., L, dim]; their sum is `decode(codes)`.

        Differentiable with update="gradient". The offset is part of level 0.

        >>> tokens = layer.embed(codes)
        """
        self.require_initialised("embed")
        flat = checks.code_rows("embed", checks.integers("embed", "codes", codes), self.levels)
        checks.code_range("embed", flat, self.codewords)
        L = flat.shape[1]
        words = self.scale[:L, None] * self.codebook[self._as_codec().rows(flat)]  # [N, L, dim]
        if self.offset is not None:
            words = torch.cat([words[:, :1] + self.offset, words[:, 1:]], dim=1)
        return words.reshape(*codes.shape, self.dim)

    def _as_codec(self) -> Parameters:
        """The current parameters, in their own dtype and not copied."""
        return Parameters(self.codebook, self.scale, self.offset, self.groups)

    @modes.plainly
    def initialise(self, x: Tensor | np.ndarray, *, seed: int | None = None) -> None:
        """Initialises offset, codebook, scale and gamma from x [..., dim], as far as the constructor left them open.

        Deterministic given `seed` (or torch's global seed). With torch.distributed it runs on rank 0 and broadcasts the
        result, so every rank must call it.
        """
        data, seed = self._data("initialise", x), checks.seed("initialise", seed)
        ranks.on_rank_zero("initialise", self, lambda: self._initialise(data, seed))
        self.initialised = True

    def _initialise(self, x: Tensor, seed: int | None) -> None:
        checks.training_data("initialise", x)
        if self.init == "kmeans":
            fitting.warn_of_few("initialise", len(x), self.codewords, "before training, call layer.initialise(x) with")
        x = fitting.sample(x, max(64 * self.codewords, 1 << 14), self.dim, fitting.seeded(seed))
        if self.init == "kmeans":
            omega = None if self.level_weights is None else x.new_tensor(self.level_weights)
            options = {"rounds": 8, "beam": 1, "noise": 0.0, "interruptible": False}
            self._take("initialise", self._fit(x, omega=omega, seed=seed, **options))
        elif self.offset is not None:
            mean = x.mean(dim=0)
            checks.finite("initialise", "the mean of x", mean, self.offset.dtype)
            self.offset.copy_(mean)
        self._set_gamma(x)
        self._initialised.fill_(True)

    @modes.plainly
    def fit(
        self,
        x: Tensor | np.ndarray | Iterable[Tensor | np.ndarray],
        *,
        rounds: int | None = None,
        beam: int = 16,
        sample: int | None = None,
        seed: int | None = None,
    ) -> tuple[float, ...]:
        """Fits offset, codebook and scale to x without labels; returns the relative squared error of every length.

        x: [..., dim], a tensor, an array or memory map, or an iterable of such batches. `sample` vectors of x are drawn
        and used; the default is 65,536 or 256 per codeword, whichever is more. rounds: by default 120, 80 with
        several codebooks, 16 above 8192 codewords. Errors are those of the sample, relative to the offset alone. The
        layer's `level_weights` weight the prefix lengths; without them the full length has weight 1, the shortest 0.16
        and the others 0.1. On Ctrl-C the best codec so far is kept, if a round is complete.

        >>> errors = layer.fit(np.load("embeddings.npy", mmap_mode="r"))
        """
        rounds = None if rounds is None else checks.integer("fit", "rounds", rounds, 1)
        beam = checks.beam("fit", beam)
        seed = checks.seed("fit", seed)
        rows = fitting.sample_size(self.codewords) if sample is None else checks.integer("fit", "sample", sample, 1)
        errors = torch.empty(self.levels, dtype=torch.float64, device=self.codebook.device)

        def update() -> None:
            data = fitting.sample(x, rows, self.dim, fitting.seeded(seed)).to(self.codebook.device)
            checks.training_data("fit", data)
            fitting.warn_of_few("fit", len(data), self.codewords)
            omega = self.level_weights or functional.default_weights(self.levels)
            weights = data.new_tensor(omega)
            fitted = self._fit(data, omega=weights, rounds=rounds, beam=beam, seed=seed)
            self._take("fit", fitted)
            self._set_gamma(data)
            self._initialised.fill_(True)
            errors.copy_(errors.new_tensor(fitted.errors))

        ranks.on_rank_zero("fit", self, update, errors)
        self.initialised = True
        return tuple(errors.tolist())

    def _fit(self, x: Tensor, **options: Any) -> fitting.Fitted:
        offset, free_scale = self.offset is not None, self.free_scale is not None
        options |= {"codebooks": self.codebooks, "offset": offset, "free_scale": free_scale}
        return fitting.fit(x, self.codewords, self.levels, **options)

    def _take(self, op: str, fitted: fitting.Fitted) -> None:
        for found in (fitted.codebook, fitted.scale, fitted.offset):
            if found is not None:
                checks.finite(op, "the codec fitted to x", found, self.codebook.dtype)
        self.forget()
        self.codebook.copy_(fitted.codebook)
        if self.w is not None:
            if any(self.powers):
                self.w.copy_(fitted.scale[self.powers.index(1)])
        elif self.free_scale is not None:
            self.free_scale.copy_(fitted.scale[[m for m, power in enumerate(self.powers) if power]])
        if self.offset is not None and fitted.offset is not None:
            self.offset.copy_(fitted.offset)

    def _set_gamma(self, x: Tensor) -> None:
        """GAMMA_C / mean gap between the best and the second best codeword of level 0, unless gamma is fixed."""
        if self.fixed_gamma is None:
            sample = x[:: -(-len(x) // (1 << 12))]
            sample = sample if self.offset is None else sample - self.offset.float()
            best_two = torch.cdist(sample, self._as_codec().words(0).float()).topk(2, dim=1, largest=False).values
            gap = float((best_two[:, 1] - best_two[:, 0]).mean())
            self.gamma.fill_(min(GAMMA_C / gap, torch.finfo(self.gamma.dtype).max) if gap > 0 else 1.0)

    def usage(self, codes: Tensor | np.ndarray) -> Tensor:
        """Counts [levels, codewords] int64: how often each codeword occurs at each level of codes [..., levels].

        -1, the code of masked vectors, is left out.

        >>> dead = layer.usage(codes).sum(dim=0) == 0
        """
        return self._counts("usage", codes)

    def _counts(self, op: str, codes: Tensor | np.ndarray) -> Tensor:
        values = checks.array(op, "codes", codes, integer=True)
        flat = checks.code_rows(op, values, self.levels).long()
        flat = flat[(flat != -1).all(dim=1)]
        checks.code_range(op, flat, self.codewords)
        return torch.stack([torch.bincount(column, minlength=self.codewords) for column in flat.unbind(dim=1)])

    def perplexity(self, codes: Tensor | np.ndarray) -> Tensor:
        """exp(entropy) of the codewords at each level of codes [..., levels], [levels]: K if all are used alike."""
        share = self.usage(codes).double()
        share = share / share.sum(dim=1, keepdim=True).clamp_min(1)
        return torch.exp(torch.special.entr(share).sum(dim=1)).float()

    @torch.no_grad()
    def observe(self, codes: Tensor | np.ndarray) -> None:
        """Counts the codewords in codes [..., levels] for the next `revive`, without -1, the code of masked vectors.

        Call it after every training step (or part of one): a codeword that one batch does not use is not dead.
        """
        counts, total = self._counts("observe", codes), torch.zeros_like(self._observed).view(-1, self.codewords)
        groups = torch.tensor(self.groups[: len(counts)], device=total.device)
        self._observed += total.index_add(0, groups, counts.to(total.device)).flatten()

    @modes.plainly
    def revive(self, x: Tensor | np.ndarray, *, below: int = 1, seed: int | None = None) -> int:
        """Replaces unused codewords by badly approximated rows of x [..., dim]; returns how many.

        Unused are those that the codes given to `observe` since the last revival used fewer than `below` times; if
        nothing was observed, those that no vector of x uses. With torch.distributed every rank must call it: counts of
        all ranks are added, and rank 0 decides.
        """
        self.require_initialised("revive")
        data, seed = self._data("revive", x), checks.seed("revive", seed)
        below = checks.integer("revive", "below", below, 1, (1 << 63) - 1)
        self._observed.copy_(ranks.summed(self._observed)[0])
        before = self.codebook.detach().clone()
        ranks.on_rank_zero("revive", self, lambda: self._revive(data, below, seed))
        return int((self.codebook != before).any(dim=1).sum())

    def _revive(self, x: Tensor, below: int, seed: int | None) -> None:
        checks.training_data("revive", x)
        x = x if self.offset is None else x - self.offset.float()
        codebook, scale = self.codebook.float(), self.scale.float()
        codec = Parameters(codebook, scale, None, self.groups)
        codes = functional.encode_checked(x, codec, 1, None)
        unused = self._observed < below if bool(self._observed.any()) else None
        self.codebook.copy_(fitting.revive(x, codes, codec, fitting.seeded(seed), unused))
        self.forget()
        self._observed.zero_()

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes parameters and constructor arguments to a safetensors file, atomically."""
        self.require_initialised("save")
        in_config = (LEVELS, CODEBOOKS)
        tensors = {name: tensor for name, tensor in self.state_dict().items() if name not in in_config}
        for name, tensor in tensors.items():
            checks.finite("save", name, tensor)
        files.write(path, "quantizer", tensors, self._config())

    @classmethod
    def load(cls, path: str | os.PathLike[str], device: torch.device | str | None = None) -> RecurrentQuantizer:
        """The layer that `save` wrote, in eval mode and on `device` (CPU by default)."""
        place = checks.device("load", device, torch.device("cpu"))
        with modes.plain(place):
            tensors, config, _ = files.read(path, "quantizer")
            with files.describing(path, "a quantizer"):
                check_sizes(tensors, config)  # before anything of these sizes is allocated
                layer = cls(**config).to(tensors["codebook"].dtype)
                layer.load_state_dict({**tensors, CODEBOOKS: torch.tensor(layer.codebooks)})
                for name, tensor in tensors.items():
                    checks.finite("load", name, tensor)
                checks.gamma_value("load", layer.gamma)
                layer.require_initialised("load")
            return layer.to(place).eval()

    def _config(self) -> dict[str, Any]:
        return {
            "dim": self.dim,
            "codewords": self.codewords,
            "levels": self.levels,
            "codebooks": self.codebooks,
            "scale": "shared" if self.w is not None else "per_level",
            "offset": self.offset is not None,
            "gamma": self.fixed_gamma,
            "joint": self.joint,
            "weights": self.weights if self.loss == "paper" else None,
            "level_weights": self.level_weights,
            "init": self.init,
            "gradient": self.gradient,
            "loss": self.loss,
            "commitment": self.commitment if self.loss == "squared" else None,
            "pull": self.pull if self.update == "ema" else None,
            "update": self.update,
        }

    def extra_repr(self) -> str:
        return ", ".join(f"{name}={value!r}" for name, value in self._config().items())

    def _initialise_in_forward(self, x: Tensor) -> None:
        if torch.compiler.is_compiling():
            _refuse_to_compile()
        if not self.training:
            self.require_initialised("forward", "; Lightning validates before it trains: set num_sanity_val_steps=0")
        elif not self._is_initialised():
            self.initialise(x)

    def _is_initialised(self) -> bool:
        """Whether it has seen data; AveragedModel copies the buffer of another layer, not its Python bool."""
        self.initialised = self.initialised or bool(self._initialised)
        return self.initialised

    def _data(self, op: str, x: Any) -> Tensor:
        """Vectors [N, dim] float32 on the codebook's device, from [..., dim], torch or numpy."""
        values = checks.floats(checks.array(op, "x", x))
        if isinstance(x, np.ndarray):
            values = values.to(self.codebook.device)
        checks.floating(op, "x", values, device=self.codebook.device)
        return checks.rows(op, "x", values, self.dim).detach().float()

    def require_initialised(self, op: str, hint: str = "") -> None:
        """Raises RuntimeError unless the layer has seen data or loaded weights; the hint ends its sentence."""
        if not self._is_initialised():
            what = "call layer.initialise(x), train it or load its weights first"
            raise RuntimeError(f"{op}: the layer has not seen data yet; {what}{hint}.")

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any, **kwargs: Any) -> None:
        state_dict.setdefault(f"{prefix}_observed", torch.zeros_like(self._observed))  # version 0.1.0 had none
        super()._load_from_state_dict(state_dict, prefix, *args, **kwargs)
        self.initialised = bool(self._initialised)
        if self.fixed_gamma is not None:
            self.fixed_gamma = float(self.gamma)


def _refuse_to_compile() -> NoReturn:
    raise RuntimeError("RecurrentQuantizer: call layer.initialise(x) before a compiled forward.")


_refuse_to_compile._dynamo_marked_constant = True  # type: ignore[attr-defined]  # called, not traced: raised as it is
