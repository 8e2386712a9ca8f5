"""Tensors of a PyTorch zip archive (`torch.save`) without unpickling.

The archive holds a pickle program, which says how tensors lie in storages, and the storages' bytes. The program's
opcodes are read, not run: names of functions stay names and nothing is imported or called. What is not a dictionary of
tensors is refused.
"""

from __future__ import annotations

import math
import pickletools
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from zipfile import BadZipFile, ZipFile

import torch
from torch import Tensor

from sae.errors import FormatError
from sae.regular import check_regular

_DTYPES = {
    "DoubleStorage": torch.float64,
    "FloatStorage": torch.float32,
    "HalfStorage": torch.float16,
    "BFloat16Storage": torch.bfloat16,
    "LongStorage": torch.int64,
    "IntStorage": torch.int32,
}
_MARK = object()


@dataclass(frozen=True)
class _Name:
    """A global of the program."""

    text: str


@dataclass(frozen=True)
class _Call:
    """What the program would have called."""

    name: Any
    arguments: Any


@dataclass(frozen=True)
class _Stored:
    """A reference to a storage: ("storage", type, key, device, numbers)."""

    what: Any


def read_archive(path: str | Path) -> dict[str, Tensor]:
    """The tensors of a dictionary that `torch.save` wrote, on the CPU.

    Raises FormatError for another file, or a program that makes anything else.
    """
    path = Path(path)
    check_regular(path)
    try:
        with ZipFile(path) as archive:
            names = [name for name in archive.namelist() if name.endswith("/data.pkl")]
            if len(names) != 1:
                raise FormatError("is not an archive of tensors (torch.save)", path)
            order = names[0].removesuffix("data.pkl") + "byteorder"
            if order in archive.namelist() and archive.read(order) != b"little":
                raise FormatError("holds tensors of another byte order", path)
            result = _result(archive.read(names[0]))
            if not isinstance(result, dict) or not all(isinstance(name, str) for name in result):
                raise FormatError("holds no dictionary of tensors", path)
            folder = names[0].removesuffix("data.pkl") + "data/"
            return {name: _tensor(value, archive, folder) for name, value in result.items()}
    except FormatError:
        raise
    except (BadZipFile, OSError, ValueError, KeyError, IndexError, TypeError, RuntimeError, EOFError) as error:
        raise FormatError(f"damaged, or more than a dictionary of tensors ({error})", path) from None


def _tensor(value: Any, archive: ZipFile, folder: str) -> Tensor:
    if isinstance(value, _Call) and value.name == _Name("torch._utils _rebuild_parameter"):
        value = value.arguments[0]
    if not isinstance(value, _Call) or value.name != _Name("torch._utils _rebuild_tensor_v2"):
        raise ValueError(f"{value!r} is not a tensor")
    storage, offset, shape, stride = value.arguments[:4]
    kind, key = storage.what[1:3]
    dtype = _DTYPES[kind.text.removeprefix("torch ")]
    data = bytearray(archive.read(folder + key))
    flat = torch.frombuffer(data, dtype=dtype) if data else torch.empty(0, dtype=dtype)
    last = offset + sum((size - 1) * step for size, step in zip(shape, stride, strict=True))
    if min((*shape, *stride, offset), default=0) < 0 or (math.prod(shape) and last >= len(flat)):
        raise ValueError(f"a tensor of {list(shape)} lies outside its storage of {len(flat)}")
    return flat.as_strided(shape, stride, offset)


def _result(program: bytes) -> Any:
    """The value that a pickle program leaves, calls replaced by `_Call`. Raises ValueError for opcodes not known."""
    stack: list[Any] = []
    memo: dict[int, Any] = {}

    def since_mark() -> list[Any]:
        place = max(number for number, value in enumerate(stack) if value is _MARK)
        values = stack[place + 1 :]
        del stack[place:]
        return values

    argument: Any
    for opcode, argument, _ in pickletools.genops(program):
        name = opcode.name
        if name in ("PROTO", "FRAME"):
            continue
        if name == "STOP":
            return stack.pop()
        if name in ("BINPUT", "LONG_BINPUT"):
            memo[argument] = stack[-1]
        elif name == "MEMOIZE":
            memo[len(memo)] = stack[-1]
        elif name in ("BINGET", "LONG_BINGET"):
            stack.append(memo[argument])
        elif name == "MARK":
            stack.append(_MARK)
        elif name == "GLOBAL":
            stack.append(_Name(argument))
        elif name == "STACK_GLOBAL":
            attribute, module = stack.pop(), stack.pop()
            stack.append(_Name(f"{module} {attribute}"))
        elif name == "EMPTY_DICT":
            stack.append({})
        elif name in ("EMPTY_TUPLE", "EMPTY_LIST"):
            stack.append(())
        elif name in ("NEWTRUE", "NEWFALSE", "NONE"):
            stack.append({"NEWTRUE": True, "NEWFALSE": False, "NONE": None}[name])
        elif name in ("TUPLE1", "TUPLE2", "TUPLE3"):
            size = int(name[-1])
            stack[-size:] = [tuple(stack[-size:])]
        elif name == "TUPLE":
            stack.append(tuple(since_mark()))
        elif name == "BINPERSID":
            stack.append(_Stored(stack.pop()))
        elif name == "REDUCE":
            arguments, function = stack.pop(), stack.pop()
            stack.append({} if function == _Name("collections OrderedDict") else _Call(function, arguments))
        elif name == "BUILD":
            stack.pop()
        elif name == "SETITEM":
            value, key = stack.pop(), stack.pop()
            stack[-1][key] = value
        elif name == "SETITEMS":
            values = since_mark()
            stack[-1].update(zip(values[::2], values[1::2], strict=True))
        elif name in ("BINUNICODE", "SHORT_BINUNICODE", "BININT", "BININT1", "BININT2", "LONG1"):
            stack.append(argument)
        else:
            raise ValueError(f"opcode {name}")
    raise ValueError("no end")
