"""Layers and codecs on the Hugging Face Hub, or in a folder like those there; `pip install 'drq_fast[huggingface]'`.

The folder has `model.safetensors`, which is what `save` writes, `config.json` and a model card.
"""

from __future__ import annotations

import importlib.util
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

if importlib.util.find_spec("huggingface_hub") is None:
    raise ModuleNotFoundError(
        "drq_fast.interop.huggingface: huggingface_hub is missing; `pip install 'drq_fast[huggingface]'` installs it."
    )

from huggingface_hub import ModelCard, ModelCardData, ModelHubMixin, hf_hub_download
from huggingface_hub.constants import CONFIG_NAME, SAFETENSORS_SINGLE_FILE

from .. import checks, files
from ..codec import Codec
from ..codes import bits
from ..quantizer import RecurrentQuantizer

_DOWNLOAD = ("revision", "token", "cache_dir", "force_download", "local_files_only")  # options
_CARD = """---
{data}
---

# {title}

A {what} of drq_fast for vectors of {dim} dimensions. The first levels of a code are a shorter code of the same vector.

| | |
| --- | --- |
| dimensions | {dim} |
| bits of a code | {bits}: {levels} levels of {each} |
| codewords of a level | {codewords} |
| codebooks | {codebooks} |

## Errors

{errors}

## Load it

`pip install 'drq_fast[huggingface]'`

```python
import drq_fast

quantizer = drq_fast.{kind}.from_pretrained("{name}")
codes = quantizer.encode(x)  # x [N, {dim}] -> [N, {levels}]
x_hat = quantizer.decode(codes)
```

## Licence

None is stated yet. The author adds it here, and as `license:` in the head of this file.
"""


class Hosted(ModelHubMixin):  # type: ignore[misc]  # mypy does not read huggingface_hub
    """A layer or a codec with what ModelHubMixin asks of a library.

    It is not a base class of theirs, so that `import drq_fast` does not import huggingface_hub.
    """

    def __init__(self, quantizer: Codec | RecurrentQuantizer) -> None:
        if isinstance(quantizer, RecurrentQuantizer):
            quantizer.require_initialised("save")  # before a folder or a repository is made
        self.quantizer = quantizer

    def _save_pretrained(self, save_directory: Path) -> None:
        quantizer = self.quantizer
        quantizer.save(save_directory / SAFETENSORS_SINGLE_FILE)
        config = {"library_name": "drq_fast", "kind": type(quantizer).__name__, **_settings(quantizer)}
        files.write_text(save_directory / CONFIG_NAME, json.dumps(config, indent=2) + "\n")

    @classmethod
    def _from_pretrained(
        cls, *, model_id: str, kind: type[Codec] | type[RecurrentQuantizer], device: Any, **options: Any
    ) -> Hosted:
        """options: of the download."""
        folder = Path(model_id)
        if folder.is_dir():
            return cls(kind.load(folder / SAFETENSORS_SINGLE_FILE, device))
        return cls(kind.load(hf_hub_download(model_id, SAFETENSORS_SINGLE_FILE, **options), device))

    def generate_model_card(self, *, name: str, errors: Sequence[float] | None) -> ModelCard:
        """What its README.md says; errors [levels] after each level."""
        quantizer = self.quantizer
        kind = type(quantizer).__name__
        data = ModelCardData(library_name="drq_fast", tags=["drq_fast", "vector-quantization", "model_hub_mixin"])
        return ModelCard(
            _CARD.format(
                data=data.to_yaml(),
                title=name.rpartition("/")[2],
                what="codec" if isinstance(quantizer, Codec) else "layer",
                dim=quantizer.dim,
                bits=quantizer.bits,
                levels=quantizer.levels,
                each=f"{bits(quantizer.codewords, 1)} bits",
                codewords=quantizer.codewords,
                codebooks=quantizer.codebooks,
                errors=_error_table(quantizer, errors),
                kind=kind,
                name=name,
            )
        )


def save_pretrained(
    quantizer: Codec | RecurrentQuantizer,
    folder: str | os.PathLike[str],
    errors: Sequence[float] | None,
    **options: Any,
) -> str | None:
    """See `Pretrained.save_pretrained`."""
    folder = Path(folder)
    name = options.get("repo_id") or folder.resolve().name
    card = {"name": name, "errors": _checked("save_pretrained", quantizer, errors)}
    return Hosted(quantizer).save_pretrained(folder, model_card_kwargs=card, **options)


def from_pretrained(kind: type[Any], name: str | os.PathLike[str], device: Any, **options: Any) -> Any:
    """See `Pretrained.from_pretrained`."""
    for option in options:
        if option not in _DOWNLOAD:
            checks.fail("from_pretrained", "options", f"among {', '.join(_DOWNLOAD)}", option, error=TypeError)
    return Hosted.from_pretrained(os.fspath(name), kind=kind, device=device, **options).quantizer


def push_to_hub(
    quantizer: Codec | RecurrentQuantizer, name: str, errors: Sequence[float] | None, **options: Any
) -> str:
    """See `Pretrained.push_to_hub`."""
    card = {"name": name, "errors": _checked("push_to_hub", quantizer, errors)}
    return Hosted(quantizer).push_to_hub(name, model_card_kwargs=card, **options)


def _settings(quantizer: Codec | RecurrentQuantizer) -> dict[str, Any]:
    if isinstance(quantizer, RecurrentQuantizer):
        return quantizer._config()
    sizes = {"dim": quantizer.dim, "codewords": quantizer.codewords, "levels": quantizer.levels}
    return {**sizes, **quantizer.settings(), "offset": quantizer.offset is not None}


def _error_table(quantizer: Codec | RecurrentQuantizer, errors: Sequence[float] | None) -> str:
    if errors is None:
        return "The author did not state them."
    rows = [f"| {bits(quantizer.codewords, m + 1)} | {error:.4g} |" for m, error in enumerate(errors)]
    return "\n".join(["| bits | relative squared error, as `fit` returns it |", "| --- | --- |", *rows])


def _checked(op: str, quantizer: Codec | RecurrentQuantizer, errors: Any) -> list[float] | None:
    """Errors [levels] as numbers."""
    if errors is None:
        return None
    wanted = f"{quantizer.levels} numbers, one after each level"
    try:
        numbers = [float(error) for error in errors]
    except (TypeError, ValueError):
        checks.fail(op, "errors", wanted, repr(errors), error=TypeError)
    if len(numbers) != quantizer.levels:
        checks.fail(op, "errors", wanted, len(numbers))
    return numbers
