"""save_pretrained, from_pretrained and push_to_hub, as the models of the Hugging Face Hub have them."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any, TypeVar

Model = TypeVar("Model", bound="Pretrained")


class Pretrained:
    """A layer or a codec in a folder or a repository of the Hub: model.safetensors, config.json and README.md.

    options are those of huggingface_hub.ModelHubMixin.
    """

    def save_pretrained(
        self, save_directory: str | os.PathLike[str], *, errors: Sequence[float] | None = None, **options: Any
    ) -> str | None:
        """Writes a folder, with a model card in README.md unless there is one; with push_to_hub=True uploads it, too.

        errors [levels]: what the card states, such as those that `fit` returned. options: push_to_hub, repo_id, and
        those of `push_to_hub`. Returns the address of an upload.

        >>> layer.save_pretrained("quantizer", errors=layer.fit(x))
        """
        from .interop.huggingface import save_pretrained

        return save_pretrained(self, save_directory, errors, **options)  # type: ignore[arg-type]

    @classmethod
    def from_pretrained(
        cls: type[Model], pretrained_model_name_or_path: str | os.PathLike[str], *, device: Any = None, **options: Any
    ) -> Model:
        """What `save_pretrained` or `push_to_hub` wrote, from a folder or from the Hub; a layer is in eval mode.

        options: revision, token, cache_dir, force_download, local_files_only.

        >>> layer = RecurrentQuantizer.from_pretrained("user/quantizer")
        """
        from .interop.huggingface import from_pretrained

        return from_pretrained(cls, pretrained_model_name_or_path, device, **options)

    def push_to_hub(self, repo_id: str, *, errors: Sequence[float] | None = None, **options: Any) -> str:
        """Uploads what `save_pretrained` writes to a repository, which is made if need be; returns the address.

        options: private, token, branch, commit_message, create_pr, allow_patterns, ignore_patterns, delete_patterns.

        >>> layer.push_to_hub("user/quantizer", private=True)
        """
        from .interop.huggingface import push_to_hub

        return push_to_hub(self, repo_id, errors, **options)  # type: ignore[arg-type]
