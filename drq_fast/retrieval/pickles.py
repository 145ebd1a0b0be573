"""Reads the pickles of CIFAR: dicts, lists, tuples, integers, strings, and arrays of uint8 or int64.

A pickled array is a call of numpy's `_reconstruct` and a state, and so is its dtype. With states of their choice these
functions read any memory. Here nothing in a pickle is called: the calls that such arrays need are recognised, and the
arrays are made from their bytes.
"""

from __future__ import annotations

import itertools
import pickle
import pickletools
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

_RECONSTRUCT = {f"numpy.{core}.multiarray _reconstruct" for core in ("core", "_core")}
_DTYPES = {("u1", "|"): "u1", ("i8", "<"): "<i8"}
_MARK = object()


class _Global(NamedTuple):
    """The name of a function or class."""

    name: str


@dataclass
class _Dtype:
    """A call of numpy.dtype; its state tells the order of the bytes. (Later arrays refer to the same object.)"""

    name: str
    order: str = ""


class _Unfilled:
    """An array without its state."""


def read(content: bytes) -> Any:
    """The object in a pickle; strings of Python 2 are bytes. Raises UnpicklingError for anything that CIFAR has not."""
    stack: list[Any] = []
    memo: dict[int, Any] = {}
    try:
        for opcode, argument, _ in pickletools.genops(content):
            _step(opcode.name, argument, stack, memo)
        (result,) = _popped(stack, max(1, len(stack)))
    except pickle.UnpicklingError:
        raise
    except Exception as error:  # pickletools raises many kinds of errors
        raise pickle.UnpicklingError(f"it is damaged: {error}") from error
    return result


def _step(opcode: str, argument: Any, stack: list[Any], memo: dict[int, Any]) -> None:
    """One operation of the stack machine."""
    match opcode:
        case "PROTO" | "FRAME" | "STOP":
            pass
        case "BININT" | "BININT1" | "BININT2" | "INT" | "LONG1":
            stack.append(argument)
        case "SHORT_BINUNICODE" | "BINUNICODE" | "SHORT_BINBYTES" | "BINBYTES" | "BINBYTES8":
            stack.append(argument)
        case "SHORT_BINSTRING" | "BINSTRING":
            stack.append(argument.encode("latin1"))
        case "NONE" | "NEWTRUE" | "NEWFALSE":
            stack.append({"NONE": None, "NEWTRUE": True, "NEWFALSE": False}[opcode])
        case "EMPTY_LIST" | "EMPTY_DICT" | "EMPTY_TUPLE":
            stack.append({"EMPTY_LIST": list, "EMPTY_DICT": dict, "EMPTY_TUPLE": tuple}[opcode]())
        case "MARK":
            stack.append(_MARK)
        case "TUPLE1" | "TUPLE2" | "TUPLE3":
            stack.append(tuple(_popped(stack, int(opcode[-1]))))
        case "TUPLE":
            stack.append(tuple(_marked(stack)))
        case "APPEND" | "APPENDS":
            items = _popped(stack, 1) if opcode == "APPEND" else _marked(stack)
            _top(stack, list).extend(items)
        case "SETITEM" | "SETITEMS":
            items = _popped(stack, 2) if opcode == "SETITEM" else _marked(stack)
            keys = items[::2]
            if len(items) % 2 or not all(type(key) in (str, bytes, int) for key in keys):
                raise pickle.UnpicklingError("it has a dict with other keys than strings and integers")
            _top(stack, dict).update(zip(keys, items[1::2], strict=True))
        case "BINPUT" | "LONG_BINPUT":
            memo[argument] = _top(stack)
        case "MEMOIZE":
            memo[len(memo)] = _top(stack)
        case "BINGET" | "LONG_BINGET":
            stack.append(memo[argument])
        case "GLOBAL":
            stack.append(_known(argument))
        case "STACK_GLOBAL":
            stack.append(_known("{} {}".format(*_popped(stack, 2))))
        case "REDUCE":
            stack.append(_called(*_popped(stack, 2)))
        case "BUILD":
            stack.append(_with_state(*_popped(stack, 2)))
        case _:
            raise pickle.UnpicklingError(f"it has the operation {opcode}, which no batch needs")


def _top(stack: list[Any], kind: type = object) -> Any:
    if not isinstance(stack[-1], kind) or stack[-1] is _MARK:
        raise pickle.UnpicklingError(f"it has a {type(stack[-1]).__name__} in place of a {kind.__name__}")
    return stack[-1]


def _popped(stack: list[Any], count: int) -> list[Any]:
    """Takes the topmost values off the stack."""
    values = stack[-count:]
    if len(values) < count or any(value is _MARK for value in values):
        raise pickle.UnpicklingError("it ends a value that it did not begin")
    del stack[-count:]
    return values


def _marked(stack: list[Any]) -> list[Any]:
    """Takes the values above the topmost mark off the stack, and the mark."""
    above = len(list(itertools.takewhile(lambda value: value is not _MARK, reversed(stack))))
    if above == len(stack):
        raise pickle.UnpicklingError("it ends a value that it did not begin")
    values = stack[len(stack) - above :]
    del stack[len(stack) - above - 1 :]
    return values


def _known(name: str) -> _Global:
    if name not in {*_RECONSTRUCT, "numpy ndarray", "numpy dtype", "_codecs encode"}:
        raise pickle.UnpicklingError(f"it refers to {name.replace(' ', '.')}")
    return _Global(name)


def _called(function: Any, arguments: Any) -> Any:
    """What a call with the arguments of such arrays returns."""
    match function, arguments:
        case _Global(name), (_Global("numpy ndarray"), (0,), b"b" | "b") if name in _RECONSTRUCT:
            return _Unfilled()
        case _Global("numpy dtype"), (b"u1" | "u1", 0, 1):
            return _Dtype("u1")
        case _Global("numpy dtype"), (b"i8" | "i8", 0, 1):
            return _Dtype("i8")
        case _Global("_codecs encode"), (str(text), "latin1"):
            return text.encode("latin1")
    raise pickle.UnpicklingError("it has a call that no batch needs")


def _with_state(value: Any, state: Any) -> Any:
    """A dtype with its byte order, or an array with its shape and bytes."""
    match value, state:
        case _Dtype(order=""), (3, b"|" | "|", None, None, None, -1, -1, 0):
            value.order = "|"
            return value
        case _Dtype(order=""), (3, b"<" | "<", None, None, None, -1, -1, 0):
            value.order = "<"
            return value
        case _Unfilled(), (1, tuple(shape), _Dtype(name, order), False, bytes(raw)) if (name, order) in _DTYPES:
            return np.frombuffer(raw, _DTYPES[name, order]).reshape(shape)
    raise pickle.UnpicklingError("it has an array of other numbers than uint8 and int64")
