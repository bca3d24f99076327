"""The pickle of a `torch.save` archive, read as data: a pickle is a program, and this interprets a few of its opcodes.

Nothing that a pickle names is imported or called: `torch_names.py` lists what may be named, and what stands for it.
Every other name and every other opcode is refused by name.
Integers, floats, texts, bytes, None, lists, tuples, dicts (OrderedDict is one) and tensors come out.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from pickletools import opcodes
from typing import Any

import numpy as np

from moereplay.traces.importers.torch_names import CALLS, DTYPES, BrokenError, Layout, Name, Storage
from moereplay.traces.schema import TraceError, shown

MOST_STEPS = 1 << 23  #: opcodes; a recording of a million tokens has about four million
LONGEST_INTEGER = 8  #: bytes
PLAIN = "numbers, texts, lists, dicts and tensors are read; keep only these and torch.save them again"


def interpret(pickle: bytes, place: str, tensor: Callable[[Layout], Any]) -> Any:
    """The document; `tensor` makes what stands for a tensor in it. Raises TraceError that begins with `place`."""
    machine = _Machine(pickle, place, tensor)
    try:
        return machine.run()
    except (BrokenError, IndexError, KeyError, TypeError, ValueError, struct.error):
        # their texts may hold values of the pickle, and a value may be too long to be shown
        raise TraceError(f"{place}: broken at byte {machine.at}; download or record it again") from None


class _Machine:
    """Stack, marks and memo of an unpickler."""

    def __init__(self, pickle: bytes, place: str, tensor: Callable[[Layout], Any]) -> None:
        self.pickle, self.place, self.tensor = pickle, place, tensor
        self.at = 0
        self.stack: list[Any] = []
        self.marked: list[list[Any]] = []  #: the stacks below each mark
        self.memo: dict[int, Any] = {}

    def run(self) -> Any:
        """The value that is left at STOP."""
        for _ in range(MOST_STEPS):
            code = self.pickle[self.at]
            self.at += 1
            if code == STOP:
                return self.stack.pop()
            if code not in STEPS:
                raise self.refused(f"opcode {_opcode(code)}")
            STEPS[code](self)
        raise TraceError(f"{self.place}: more than {MOST_STEPS:,} opcodes; record fewer tokens per file")

    def refused(self, what: str) -> TraceError:
        """The error for what a pickle may hold and a trace may not."""
        return TraceError(f"{self.place}: {what} is not read, as a pickle can run code; {PLAIN}")

    def take(self, size: int) -> bytes:
        """The next bytes."""
        taken = self.pickle[self.at : self.at + size]
        if len(taken) < size:
            raise BrokenError
        self.at += size
        return taken

    def line(self) -> str:
        """The next bytes up to a newline."""
        end = self.pickle.index(b"\n", self.at)
        return self.take(end + 1 - self.at)[:-1].decode()

    def since_mark(self) -> list[Any]:
        """Everything above the last mark, which goes."""
        values, self.stack = self.stack, self.marked.pop()
        return values


def _opcode(code: int) -> str:
    return next((known.name for known in opcodes if known.code == chr(code)), f"{code:#04x}")


# ---------------------------------------------------------------- what may be called


def _call(machine: _Machine) -> None:
    arguments, function = machine.stack.pop(), machine.stack.pop()
    if not isinstance(function, Name) or function.text not in CALLS or not isinstance(arguments, tuple):
        raise machine.refused(f"a call of {_kind(function)}")
    machine.stack.append(CALLS[function.text](machine.tensor, *arguments))


def _kind(value: Any) -> str:
    return shown(value.text.replace(" ", ".")) if isinstance(value, Name) else type(value).__name__


# ---------------------------------------------------------------- opcodes


def _number(form: str) -> Callable[[_Machine], None]:
    parser = struct.Struct(form)

    def push(machine: _Machine) -> None:
        machine.stack.append(parser.unpack(machine.take(parser.size))[0])

    return push


def _constant(value: Any) -> Callable[[_Machine], None]:
    return lambda machine: machine.stack.append(value)


def _integer(machine: _Machine) -> None:
    size = machine.take(1)[0]
    if size > LONGEST_INTEGER:
        raise machine.refused(f"an integer of {size} bytes")
    machine.stack.append(int.from_bytes(machine.take(size), "little", signed=True))


def _text(form: str) -> Callable[[_Machine], None]:
    def push(machine: _Machine) -> None:
        (size,) = struct.unpack(form, machine.take(struct.calcsize(form)))
        machine.stack.append(machine.take(size).decode("utf-8", "surrogatepass"))

    return push


def _bytes(form: str) -> Callable[[_Machine], None]:
    def push(machine: _Machine) -> None:
        (size,) = struct.unpack(form, machine.take(struct.calcsize(form)))
        machine.stack.append(machine.take(size))

    return push


def _skip(size: int) -> Callable[[_Machine], None]:
    def skip(machine: _Machine) -> None:
        machine.take(size)

    return skip


def _mark(machine: _Machine) -> None:
    machine.marked.append(machine.stack)
    machine.stack = []


def _tuple(size: int) -> Callable[[_Machine], None]:
    def push(machine: _Machine) -> None:
        values = [machine.stack.pop() for _ in range(size)]
        machine.stack.append(tuple(reversed(values)))

    return push


def _marked_tuple(machine: _Machine) -> None:
    values = machine.since_mark()
    machine.stack.append(tuple(values))


def _append(machine: _Machine) -> None:
    value = machine.stack.pop()
    _last(machine, list).append(value)


def _appends(machine: _Machine) -> None:
    values = machine.since_mark()
    _last(machine, list).extend(values)


def _set_item(machine: _Machine) -> None:
    value, key = machine.stack.pop(), machine.stack.pop()
    _put(machine, [key, value])


def _set_items(machine: _Machine) -> None:
    _put(machine, machine.since_mark())


def _put(machine: _Machine, pairs: list[Any]) -> None:
    """Keys are plain: the hash of a tuple of tuples may take for ever."""
    into = _last(machine, dict)
    for key, value in zip(pairs[::2], pairs[1::2], strict=True):
        if not isinstance(key, str | int | float | bool | None):
            raise machine.refused(f"a key that is a {type(key).__name__}")
        into[key] = value


def _last(machine: _Machine, kind: type) -> Any:
    if not isinstance(machine.stack[-1], kind):
        raise BrokenError
    return machine.stack[-1]


def _remember(form: str) -> Callable[[_Machine], None]:
    def put(machine: _Machine) -> None:
        (index,) = struct.unpack(form, machine.take(struct.calcsize(form)))
        machine.memo[index] = machine.stack[-1]

    return put


def _remember_next(machine: _Machine) -> None:
    machine.memo[len(machine.memo)] = machine.stack[-1]


def _recall(form: str) -> Callable[[_Machine], None]:
    def get(machine: _Machine) -> None:
        (index,) = struct.unpack(form, machine.take(struct.calcsize(form)))
        machine.stack.append(machine.memo[index])

    return get


def _global(machine: _Machine) -> None:
    _name(machine, machine.line(), machine.line())


def _stack_global(machine: _Machine) -> None:
    attribute, module = machine.stack.pop(), machine.stack.pop()
    if not isinstance(module, str) or not isinstance(attribute, str):
        raise BrokenError
    _name(machine, module, attribute)


def _name(machine: _Machine, module: str, attribute: str) -> None:
    name = f"{module} {attribute}"
    if name not in CALLS and name not in DTYPES:
        raise machine.refused(shown(f"{module}.{attribute}"))
    machine.stack.append(Name(name))


def _storage(machine: _Machine) -> None:
    kind, dtype, key, _, length = machine.stack.pop()
    if kind != "storage" or not isinstance(dtype, Name) or not isinstance(key, str) or type(length) is not int:
        raise BrokenError
    machine.stack.append(Storage(key, DTYPES[dtype.text], length))


def _set_state(machine: _Machine) -> None:
    """Only numpy's types have one: the order of their bytes comes second."""
    state = machine.stack.pop()
    if not isinstance(machine.stack[-1], np.dtype):
        raise machine.refused("the state of an object")
    if state[1] not in ("<", "|"):
        raise machine.refused("a number of big-endian bytes")


STOP = ord(".")
STEPS: dict[int, Callable[[_Machine], None]] = {
    code[0]: step
    for code, step in (
        (b"\x80", _skip(1)),
        (b"\x95", _skip(8)),
        (b"N", _constant(None)),
        (b"\x88", _constant(True)),
        (b"\x89", _constant(False)),
        (b"K", _number("<B")),
        (b"M", _number("<H")),
        (b"J", _number("<i")),
        (b"G", _number(">d")),
        (b"\x8a", _integer),
        (b"X", _text("<I")),
        (b"\x8c", _text("<B")),
        (b"B", _bytes("<I")),
        (b"C", _bytes("<B")),
        (b"(", _mark),
        (b")", _constant(())),
        (b"t", _marked_tuple),
        *((bytes([0x84 + size]), _tuple(size)) for size in (1, 2, 3)),
        (b"]", lambda machine: machine.stack.append([])),
        (b"}", lambda machine: machine.stack.append({})),
        (b"a", _append),
        (b"e", _appends),
        (b"s", _set_item),
        (b"u", _set_items),
        (b"q", _remember("<B")),
        (b"r", _remember("<I")),
        (b"\x94", _remember_next),
        (b"h", _recall("<B")),
        (b"j", _recall("<I")),
        (b"c", _global),
        (b"\x93", _stack_global),
        (b"R", _call),
        (b"b", _set_state),
        (b"Q", _storage),
    )
}
