"""Random policy files: hooks of every kind over every table, with memories, parameters, promises and odd statements.

An honest file keeps what it declares, and its integers stay within 64 bits, so that both engines must agree on it. One
that is not may be refused.
"""

from __future__ import annotations

from random import Random
from typing import NamedTuple

from moereplay.policies.declaration import HOOKS
from tests.kit.strange_expressions import (
    COPY_WHOLES,
    EXPERT_WHOLES,
    LOCAL,
    NOW_WHOLES,
    PRELUDE,
    WIDEST,
    Expressions,
    Names,
    Value,
    optional_in,
)

KINDS = ("routing", "prefetch", "eviction", "miss")
EVENTS = ("on_use", "on_insert", "on_evict", "on_predict")
ROWS, REGS, REALS = 3, 2, 3
#: Columns that only a copy's own events write (rows), or gates (regs, reals); honest keys read no others.
KEYED = 0
#: The column of `own.reals` whose floats may be none.
ODD = 2
X = "expert_of(now, y)"


class Sort(NamedTuple):
    """The kind of a file: honest files keep promises, wild ones may leave 64 bits, silent ones have no event hooks."""

    honest: bool
    wild: bool
    silent: bool
    short: bool


class File(NamedTuple):
    """A policy file."""

    kind: str
    name: str
    text: str
    spelled: str  #: the policy with its parameters, as an option takes it
    future: bool  #: whether it declares that it needs the future


def tables(row: str, copy: str) -> tuple[Value, ...]:
    """The columns of an expert's and a copy's row."""
    found = [Value(f'experts[{row}]["{name}"]', most) for name, most in EXPERT_WHOLES.items()]
    return (*found, *(Value(f'copies[{copy}]["{name}"]', most) for name, most in COPY_WHOLES.items()))


def of_now(*names: str) -> tuple[Value, ...]:
    """Columns of the execution point."""
    return tuple(Value(f'now["{name}"]', NOW_WHOLES[name]) for name in names or NOW_WHOLES)


class Author:
    """Writes one file; `hooks_of_kind` are those that its kind has beside events."""

    def __init__(self, dice: Random, kind: str, name: str, sort: Sort) -> None:
        self.dice, self.kind, self.name = dice, kind, name
        self.honest, _, self.silent, self.short = sort
        self.write = Expressions(dice, sort.wild, 2 if sort.short else 3)
        self.hooks: dict[str, str] = {}
        self.declared: dict[str, str] = {}
        self.needs: set[str] = set()
        self.spelled = name
        self.par_slots = 0
        self.free = range(1, ROWS)  #: columns of `own.rows` that any hook may write

    def file(self) -> File:
        """The whole of it."""
        helpers = self._helpers()
        params = self._params()
        self.hooks_of_kind()
        self._events()
        return File(self.kind, self.name, self._text(helpers, params), self.spelled, "future" in self.needs)

    def hooks_of_kind(self) -> None:
        """Adds to `hooks`, `declared` and `needs`."""
        raise NotImplementedError

    # the file

    def _text(self, helpers: str, params: str) -> str:
        body = "\n\n".join(self.hooks.values())
        needs = ", ".join(f'"{need}"' for need in sorted(self.needs))
        fields = {"name": f'"{self.name}"', "summary": '"strange"', "source": '"drawn"', "params": "PARAMS"}
        fields |= {"memory": f"Memory(rows={ROWS}, regs={REGS}, reals={REALS})", "needs": f"always({needs})"}
        fields |= {hook: hook for hook in self.hooks} | self.declared
        if self.dice.random() < 0.5:
            read = optional_in(body + helpers) | {name for name in ("ids", "needed") if self.dice.random() < 0.2}
            fields["reads"] = f"frozenset({sorted(read)!r})"
        given = "\n".join(f"    {name}={value}," for name, value in fields.items())
        made = f"POLICY = {self.kind.capitalize()}(\n{given}\n)\n"
        return f'"""Strange."""\n\n{PRELUDE}\n{helpers}\n{params}\n\n\n{body}\n\n\n{made}'

    def _helpers(self) -> str:
        """Constants, tuples, closures, defaults and functions that call each other."""
        tuple_of = tuple(self.dice.randrange(-99, 100) for _ in range(self.dice.choice((2, 3, 5))))
        self.write.tables.append(("TABLE", len(tuple_of)))
        names = Names((Value("a", LOCAL), Value("b", LOCAL), Value("CONSTANT", 1 << 41)))
        bodies = [self.write.within(self.write.whole(names), LOCAL).text for _ in range(3)]
        forms = ["plain({}, {})", "closed({}, {})", "defaulted({}, {})", "plain({}, b={})", "plain(b={1}, a={0})"]
        text = [f"TABLE = {tuple_of}", f"CONSTANT = {self.dice.choice((3, -5, 1 << 40))}"]
        text += [f"\n\ndef plain(a, b):\n    return {bodies[0]}"]
        text += [
            f"\n\ndef made(c):\n    def inner(a, b):\n        return ({bodies[1]}) % 1000003 + c\n    return inner"
        ]
        text += [f"\n\nclosed = made({self.dice.randrange(-5, 6)})"]
        text += [f"\n\ndef defaulted(a, b, c={self.dice.randrange(9)}, d=TABLE[0]):"]
        text += [f"    if a > b:\n        return plain(b, a) % 99991 + c\n    return ({bodies[2]}) % 65521 - d"]
        self.write.helpers = self.dice.sample(forms, 3)
        return "\n".join(text)

    def _params(self) -> str:
        """Some parameters, of which some are given other values than their defaults."""
        made: list[tuple[str, str, int]] = [
            ('Number("alpha", 0.25, -4, 4)', f"alpha={self.dice.choice((-4, 0.1, 4))}", 1),
            ('Number("count", 3, 0, 1000, integer=True)', f"count={self.dice.randrange(9)}", 1),
            ('HalfLife("life", 2, 1, 99)', "life=7", 2),
            ('Choice("how", "a", ("a", "b"))', "how=b", 1),
            ('Numbers("list", (1.0, 2.0), 0, 9)', "list=3/0.5/9", 5),
        ]
        chosen = self.dice.sample(made, self.dice.randrange(4))
        self.par_slots = sum(width for _, _, width in chosen)
        self.spelled += "".join(f":{given}" for _, given, _ in chosen if self.dice.random() < 0.5)
        return f"PARAMS = ({''.join(text + ', ' for text, _, _ in chosen)})"

    # what a hook can read

    def _names(self, row: str = "len(experts) - 1", copy: str = "len(copies) - 1", at_gate: bool = False) -> Names:
        """Everywhere: the tables at some row and at a random one, and the memory."""
        other = self.dice.choice(("0", "len(experts) - 1", "len(experts) // 2"))
        wholes = [*of_now(), *tables(row, copy), *tables(other, other), *self._memory(copy)]
        reals = [Value(f"own.reals[{at}][{column}]", 1e6) for at in ("0", "-1") for column in range(ODD)]
        names = Names(tuple(wholes), (*reals, *self._par()), tuple(f"own.reals[{at}][{ODD}]" for at in ("0", "-1")))
        return names.plus(*self._at_gate()) if at_gate else names

    def _memory(self, copy: str) -> list[Value]:
        found = [Value(f"own.rows[{copy}][{column}]", WIDEST) for column in range(ROWS)]
        found += [Value(f"own.regs[{pool}][{column}]", WIDEST) for pool in ("0", "-1") for column in range(REGS)]
        return [*found, Value("own.capacity[0]", LOCAL), Value("len(own.regs)", 99), Value("len(copies)", 999)]

    def _par(self) -> list[Value]:
        return [Value(f"own.par[{at}]", 1000) for at in range(self.par_slots)]

    def _at_gate(self) -> list[Value]:
        """The demand may be empty, and a token not routed."""
        n = "min({}, len(step.expert) - 1)"
        arrays = ("expert", "rank", "mass", "tokens")
        some = [f"(step.{name}[{n.format(self.dice.randrange(3))}] if len(step.expert) > 0 else -3)" for name in arrays]
        return [*(Value(text, LOCAL) for text in some), Value("len(step.expert)", 99), Value("step.ids[0][0]", 99)]

    # statements

    def _define(self, hook: str, names: Names, *ending: str, writes: str = "free") -> None:
        """A hook: local variables, some statements, then the ending."""
        lines = ["a, b, f = 0, 1, 0.5"]
        local = names.plus(Value("a", LOCAL), Value("b", LOCAL), reals=(Value("f", 1e6),))
        for _ in range(self.dice.randrange(2 if self.short else 4)):
            lines += self._statement(local, writes, 2)
        arguments = ", ".join(HOOKS[hook].arguments)
        body = "\n".join(f"    {line}" for line in (*lines, *ending) if line)
        self.hooks[hook] = f"def {hook}({arguments}):\n{body}\n"

    def _statement(self, names: Names, writes: str, depth: int) -> list[str]:
        made = [self._assign, self._assign]
        made += [self._store, self._store] if writes != "none" else []
        made += [self._if, self._for, self._while] if depth else []
        return self.dice.choice(made)(names, writes, depth)

    def _block(self, names: Names, writes: str, depth: int) -> list[str]:
        lines = [line for _ in range(self.dice.choice((1, 2))) for line in self._statement(names, writes, depth - 1)]
        return [f"    {line}" for line in lines]

    def _assign(self, names: Names, writes: str, depth: int) -> list[str]:
        value = self.write.within(self.write.whole(names), LOCAL).text
        real = f"f = max(-1e6, min(1e6, {self.write.real(names).text}))"
        prime = self.dice.choice((65_521, -97))
        return self.dice.choice(
            ([f"a = {value}"], [f"b = {value}"], [real], ["a, b = b, a"], [f"a = (a + {value}) % {prime}"],
             [f"b //= {self.dice.choice((2, -3))}"], ["a >>= 1", "b ^= a"], ["f /= 3.0"], [f"a -= {value}", "a %= 999"])
        )  # fmt: skip

    def _store(self, names: Names, writes: str, depth: int) -> list[str]:
        """To columns that are free here; `own` says which copy, if any, the event is about."""
        value = self.write.whole(names).text
        free = [f"own.rows[{self.write.below(2, names)}][{c}] = {value}" for c in self.free]
        free += [f"own.regs[{self.dice.choice(('0', '-1'))}][1] = {value}"]
        free += [f"own.reals[-1][1] = max(-1e6, min(1e6, {self.write.real(names).text}))"]
        free += [f"own.reals[0][{ODD}] = {self.write.strange_real(names)}"]
        if writes == "copy":
            free += [f"own.rows[y][{KEYED}] = {value}"] * 4 + [f"own.rows[y][1] = {value}"]
        if writes == "gate":
            free += [f"own.regs[-1][{KEYED}] = {value}", f"own.reals[0][{KEYED}] = float(a % 99)"]
        return [self.dice.choice(free)]

    def _if(self, names: Names, writes: str, depth: int) -> list[str]:
        lines = [f"if {self.write.truth(names)}:", *self._block(names, writes, depth)]
        if self.dice.random() < 0.3:
            lines += [f"elif {self.write.truth(names)}:", *self._block(names, writes, depth)]
        return lines + (["else:", *self._block(names, writes, depth)] if self.dice.random() < 0.5 else [])

    def _for(self, names: Names, writes: str, depth: int) -> list[str]:
        index = f"i{depth}"
        over = ("range(3)", "range(-2, 5, 3)", "range(4, -1, -2)", "range(len(experts) - 1, -1, -2)", "(3, -1, 4)")
        inside = names.plus(Value(index, 999))
        if writes != "none":  # a key, which reads its own rows alone
            inside = inside.plus(*tables(f"{index} % len(experts)", f"len(copies) - 1 - {index} % len(copies)"))
        lines = [f"for {index} in {self.dice.choice(over)}:", *self._block(inside, writes, depth)]
        if self.dice.random() < 0.3:
            lines += [f"    if {self.write.truth(inside)}:", f"        {self.dice.choice(('break', 'continue'))}"]
            lines += ["    b = (b + 1) % 1000", "else:", "    a = 7"]
        return lines

    def _while(self, names: Names, writes: str, depth: int) -> list[str]:
        turns = f"w{depth}"
        lines = [f"{turns} = {self.dice.randrange(5)}", f"while {turns} > 0:", f"    {turns} -= 1"]
        return lines + self._block(names.plus(Value(turns, 9)), writes, depth)

    # what every kind may have

    def _events(self) -> None:
        """Hooks that listen; those of an honest eviction write to columns that its key reads only what it may."""
        if self.silent:
            return
        keyed = self.kind == "eviction"
        if self.dice.random() < 0.5 and "on_gate" not in self.hooks:
            self._define("on_gate", self._names(at_gate=True), writes="gate" if keyed else "free")
        for event in EVENTS:
            if event not in self.hooks and self.dice.random() < (0.2 if self.short else 0.4):
                names = self._names(X, "y")
                names = names.plus(Value("prefetched", 1)) if event == "on_insert" else names
                self._define(event, names, writes="copy")
