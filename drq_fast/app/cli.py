"""The entry point of the `drq-fast` command: runs one command, prints its result, and turns errors into exit codes.

Results go to stdout, progress and errors to stderr. Exit codes: 0 for success, 1 for an error, 2 for wrong options, 130
for Ctrl-C.
"""

from __future__ import annotations

import json
import os
import re
import signal
import sys
import threading
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NoReturn


class _Interrupted(BaseException):
    """Ctrl-C. It is not a KeyboardInterrupt, because `RecurrentQuantizer.fit` catches that to return its best codec."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command line; returns the exit code."""
    name = "drq-fast"
    try:  # imports are inside it, so that Ctrl-C is caught while they run
        from .options import parse

        options = parse(arguments)
        name = options.prog
        with _interruptible():
            from . import commands  # imports torch, which takes seconds
        with _interruptible(), _notes(name):
            result, text = getattr(commands, options.command)(options)
        print(json.dumps(result, indent=1) if options.json else text, flush=True)
        return 0
    except (_Interrupted, KeyboardInterrupt):
        return _failed(f"{name}: interrupted; finished files are kept", 130)
    except BrokenPipeError:  # the reader of stdout has closed it; keep Python from failing again at exit
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except (ValueError, TypeError, OSError, MemoryError, ImportError, RuntimeError, OverflowError) as error:
        # One line, without the name of the Python function and the C++ stack that torch appends.
        message = re.sub(r"^\w+: ", "", " ".join(str(error).partition("\nException raised")[0].split()))
        return _failed(f"{name}: {message or type(error).__name__}", 1)


def _failed(message: str, code: int) -> int:
    print(message, file=sys.stderr)
    return code


@contextmanager
def _interruptible() -> Iterator[None]:
    """Raises _Interrupted after Ctrl-C, even if the code inside swallows the exception or replaces it by another.

    Python itself swallows, and prints, exceptions of signal handlers that run in a callback, as imports have them.
    """
    interrupted, hook = False, sys.unraisablehook

    def interrupt(*_: object) -> NoReturn:
        nonlocal interrupted
        interrupted = True
        raise _Interrupted

    def unraisable(event: Any) -> None:
        if event.exc_type is not _Interrupted:
            hook(event)

    ignored = signal.getsignal(signal.SIGINT) is signal.SIG_IGN  # a shell sets this for background jobs
    if ignored or threading.current_thread() is not threading.main_thread():
        yield
        return
    before, sys.unraisablehook = signal.signal(signal.SIGINT, interrupt), unraisable
    try:
        yield
    except Exception:
        if not interrupted:
            raise
    finally:
        signal.signal(signal.SIGINT, before)
        sys.unraisablehook = hook
    if interrupted:
        raise _Interrupted


@contextmanager
def _notes(name: str) -> Iterator[None]:
    """Prints warnings as single lines that start with the name of the command."""
    with warnings.catch_warnings():
        warnings.simplefilter("always", UserWarning)
        warnings.showwarning = lambda message, *_, **__: print(f"{name}: note: {message}", file=sys.stderr)
        yield


if __name__ == "__main__":
    sys.exit(main())
