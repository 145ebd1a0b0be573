"""Semantic search in the documentation of Python's standard library, with codes of one to three bytes.

    python examples/text_search.py ["the calendar of a month" ...]

Needs `pip install 'drq_fast[demo]'` (scikit-learn).

Each text is the documentation of a function or class. Latent semantic analysis (TF-IDF and a truncated SVD) turns it
into a vector; any other embedding would do. The codec is fitted to the vectors without labels, the index stores three
bytes per vector, and queries are answered from the first one, two or all three bytes.
"""

from __future__ import annotations

import argparse
import importlib
import inspect
import sys
import warnings

import numpy as np

try:
    from sklearn.decomposition import TruncatedSVD
    from sklearn.feature_extraction.text import TfidfVectorizer
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import Normalizer
except ImportError as error:
    sys.exit(f"examples/text_search.py: {error.name} is missing; `pip install 'drq_fast[demo]'` installs it.")

import drq_fast
from drq_fast.retrieval.evaluate import recall

QUESTIONS = ("the calendar of a month", "walk through a directory tree", "the median of numbers")
SKIPPED = {"antigravity", "this", "idlelib", "lib2to3", "turtledemo", "__main__"}  # importing these has side effects


def library() -> dict[str, str]:
    """The documentation of everything public in the standard library, by name."""
    texts = {}
    for module in sorted(sys.stdlib_module_names - SKIPPED):
        if module.startswith("_"):
            continue
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                members = inspect.getmembers(importlib.import_module(module))
        except ImportError:  # modules of other platforms
            continue
        for name, member in members:
            text = inspect.getdoc(member)
            own = getattr(member, "__module__", None) in (module, None)
            if text and own and not name.startswith("_") and (inspect.isroutine(member) or inspect.isclass(member)):
                texts[f"{module}.{name}"] = f"{module} {name} {text}"
    return texts


def main() -> None:
    """Fits a codec, builds an index, and answers queries at three code lengths."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("questions", nargs="*", default=QUESTIONS)
    options = parser.parse_args()

    texts = library()
    names = list(texts)
    embed = make_pipeline(
        TfidfVectorizer(sublinear_tf=True, stop_words="english", min_df=2),
        TruncatedSVD(128, random_state=0),
        Normalizer(),
    )
    x = embed.fit_transform(list(texts.values())).astype(np.float32)

    layer = drq_fast.RecurrentQuantizer(dim=128, codewords=256, levels=3)
    layer.fit(x, seed=0)
    index = drq_fast.Index(layer, metric="cosine")
    index.add(x, beam=16)

    nearest = (-x[:500] @ x.T).argsort(axis=1)[:, :10]
    print(f"{len(names)} texts; {x.shape[1] * 4} bytes a vector")
    for levels in (1, 2, 3):
        found = index.search(x[:500], k=10, levels=levels).ids
        print(
            f"{levels} byte{'s' * (levels > 1)}: {recall(found, nearest):.0%} of the 10 nearest are among the first 10"
        )
    for question in options.questions:
        print(f"\n{question}?")
        query = embed.transform([question]).astype(np.float32)
        for levels in (1, 2, 3):
            ids = index.search(query, k=4, levels=levels).ids[0]
            print(f"  {levels} byte{'s' * (levels > 1):1}  {', '.join(names[i] for i in ids)}")


if __name__ == "__main__":
    main()
