"""The entry point of the `drq-fast` command: runs one command, prints its result, and turns errors into exit codes.

Results go to stdout, progress and errors to stderr. Exit codes: 0 for success, 2 for an option or argument that is
unknown, missing or has a value that is not allowed, 1 for any other error, 130 for Ctrl-C.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import re
import signal
import sys
import threading
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NoReturn

_CALL = re.compile(r"before training, call layer\.initialise\(x\) with")  # advice for Python


class _Interrupted(BaseException):
    """Ctrl-C in all commands but `fit`. Code that catches KeyboardInterrupt to go on does not catch this."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command line; returns the exit code."""
    name, shown, options = "drq-fast", dict[str, str](), None
    try:  # imports are inside it, so that Ctrl-C is caught while they run
        from .options import parse

        options = parse(arguments)
        name, shown = options.prog, options.shown
        with _interruptible():
            from . import commands  # imports torch, which takes seconds
        # `RecurrentQuantizer.fit` catches KeyboardInterrupt and keeps its best codec, which the command then writes.
        with _interruptible(KeyboardInterrupt if options.command == "fit" else _Interrupted), _notes(name):
            result, text = getattr(commands, options.command)(options)
            print(_as_json(result) if options.json else text, flush=True)
        return 0
    except (_Interrupted, KeyboardInterrupt):
        return _failed(f"{name}: interrupted; {_left(options)}", 130)
    except BrokenPipeError:  # the reader of stdout has closed it; keep Python from failing again at exit
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except (ValueError, TypeError, OSError, MemoryError, ImportError, RuntimeError, OverflowError) as error:
        # One line, without the C++ stack that torch appends.
        message = _without_function(" ".join(str(error).partition("\nException raised")[0].split()))
        wrong = re.match(r"\w+(?= must be )", message)  # the form of `checks.fail`
        if wrong and wrong[0] in shown:
            code = 1 if wrong[0] == "x" else 2  # x: the numbers in files, which no option can mend
            return _failed(f"{name}: {shown[wrong[0]]}{message[wrong.end() :]}", code)
        return _failed(f"{name}: {message or type(error).__name__}", 1)


def _as_json(result: dict[str, Any]) -> str:
    """A result as strict JSON, which has null for NaN and infinities."""

    def strict(value: Any) -> Any:
        if isinstance(value, dict):
            return {name: strict(each) for name, each in value.items()}
        if isinstance(value, (list, tuple)):
            return [strict(each) for each in value]
        return None if isinstance(value, float) and not math.isfinite(value) else value

    return json.dumps(strict(result), indent=1, allow_nan=False)


def _left(options: argparse.Namespace | None) -> str:
    """What an interrupted command leaves, and whether it can be resumed."""
    if options is None:
        return "finished files are kept"
    written = "written" in options
    if options.command in ("train", "encode"):
        return "the same command resumes"
    if options.command == "fit":
        return "the best codec so far was written" if written else "no codec was written"
    if options.command == "build" and not written:
        return f"{options.index} was not written"
    return "finished files are kept"


def _without_function(message: str) -> str:
    """A message without the name of the Python function that it starts with."""
    return re.sub(r"^\w+: ", "", message)


def _failed(message: str, code: int) -> int:
    print(message, file=sys.stderr)
    return code


@contextmanager
def _interruptible(kind: type[BaseException] = _Interrupted) -> Iterator[None]:
    """Raises `kind` at Ctrl-C; raises _Interrupted at the end if the code inside swallowed or replaced that.

    Python itself swallows, and prints, exceptions of signal handlers that run in a callback, as imports have them.
    """
    interrupted, hook = False, sys.unraisablehook

    def interrupt(*_: object) -> NoReturn:
        nonlocal interrupted
        interrupted = True
        raise kind

    def unraisable(event: Any) -> None:
        if event.exc_type is not kind:
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
    """Prints warnings as single lines that start with the name of the command, not of the Python function."""

    def note(message: Warning | str, *_: object, **__: object) -> None:
        text = _CALL.sub("take fewer --codewords, or more --train to have", _without_function(str(message)))
        print(f"{name}: note: {text}", file=sys.stderr)

    with warnings.catch_warnings():
        warnings.simplefilter("always", UserWarning)
        warnings.showwarning = note
        yield


if __name__ == "__main__":
    sys.exit(main())
