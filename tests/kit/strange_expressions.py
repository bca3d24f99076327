"""Random expressions of Python for hooks, each with a bound, so that no step of it leaves 64 bits unless asked to."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random
from typing import NamedTuple

from moereplay.policies.contract import NEVER, OPTIONAL

LOWEST, HIGHEST = -(1 << 63), (1 << 63) - 1
WIDEST = 1 << 63  #: no integer of 64 bits is farther from 0
EXACT = 1 << 52  #: floats hold integers up to here
LOCAL = 1 << 40  #: of the local variables of a hook
PRIMES = (7, 97, 65_521, 2_147_483_647, 1_152_921_504_606_846_883, (1 << 61) - 1)
#: What every file begins with; `whole` and `real` expressions use it.
PRELUDE = """import math

from moereplay.policies.contract import (
    ABSENT, CPU, DROP, IN_FLIGHT, NEVER, NONE, PER_TOKEN, QUEUED, RESIDENT, UNIT,
    Choice, Eviction, HalfLife, Memory, Miss, Number, Numbers, Prefetch, Routing, always, expert_of,
)

LOWEST, HIGHEST = -(1 << 63), (1 << 63) - 1
NAN, INF = float("nan"), float("inf")
"""


class Value(NamedTuple):
    """An expression, and the most that its value can be away from 0."""

    text: str
    most: float


class Names(NamedTuple):
    """The names that a hook can read at some point of its text."""

    wholes: tuple[Value, ...]
    reals: tuple[Value, ...] = ()
    odd: tuple[str, ...] = ()  #: floats that may be NaN or without end

    def plus(self, *wholes: Value, reals: Sequence[Value] = (), odd: Sequence[str] = ()) -> Names:
        """With more names."""
        return Names((*self.wholes, *wholes), (*self.reals, *reals), (*self.odd, *odd))


class Expressions:
    """Draws expressions, as deep as asked; `wild` ones may leave 64 bits."""

    def __init__(self, dice: Random, wild: bool, depth: int) -> None:
        self.dice, self.wild, self.depth = dice, wild, depth
        self.helpers: list[str] = []  #: functions of two integers below LOCAL, of which all answers are below LOCAL
        self.tables: list[tuple[str, int]] = []  #: tuples of integers below LOCAL, and their lengths

    # integers

    def whole(self, names: Names, depth: int | None = None) -> Value:
        """An integer."""
        depth = self.depth if depth is None else depth
        if depth == 0 or self.dice.random() < 0.15:
            return self._leaf(names)
        made = self.dice.choice((self._sum, self._sum, self._product, self._quotient, self._remainder, self._bits))
        if self.dice.random() < 0.6:
            made = self.dice.choice((self._shift, self._sign, self._least, self._branch, self._called, self._converted))
        return made(names, depth - 1)

    def below(self, limit: int, names: Names, depth: int = 2) -> str:
        """An integer from 0 to limit - 1."""
        return f"({self.whole(names, depth).text} % {limit})"

    def within(self, value: Value, limit: float) -> Value:
        """Return the value if it is certainly below the limit, else its remainder."""
        if value.most < limit or self._lets_go():
            return value
        prime = max(prime for prime in PRIMES if prime <= limit)
        return Value(f"({value.text} % {self.dice.choice((prime, -prime))})", prime)

    def _lets_go(self) -> bool:
        return self.wild and self.dice.random() < 0.3

    def _leaf(self, names: Names) -> Value:
        if names.wholes and self.dice.random() < 0.75:
            return self.dice.choice(names.wholes)
        small = Value(str(self.dice.randrange(-9, 10)), 10)
        large = Value(str(self.dice.choice((1 << 31, -(1 << 31), 1 << 40, (1 << 53) + 1, -(1 << 62)))), 1 << 62)
        end = Value(self.dice.choice(("LOWEST", "HIGHEST", "NEVER", "(LOWEST + 1)")), WIDEST)
        return self.dice.choice((small, small, small, large, end))

    def _two(self, names: Names, depth: int, limit: float = WIDEST + 1) -> tuple[Value, Value]:
        a, b = self.whole(names, depth), self.whole(names, depth)
        return self.within(a, limit), self.within(b, limit)

    def _sum(self, names: Names, depth: int) -> Value:
        a, b = self._two(names, depth, 1 << 62)
        return Value(f"({a.text} {self.dice.choice('+-')} {b.text})", a.most + b.most)

    def _product(self, names: Names, depth: int) -> Value:
        a, b = self._two(names, depth, 1 << 31)
        return Value(f"({a.text} * {b.text})", a.most * b.most)

    def _quotient(self, names: Names, depth: int) -> Value:
        a = self.within(self.whole(names, depth), WIDEST)
        by = self.whole(names, depth)
        divisor = self.dice.choice(
            (f"(1 + {by.text} % 9)", f"(-1 - {by.text} % 5)", str(self.dice.choice((-7, -2, 3))))
        )
        if self._lets_go():
            divisor = by.text
        form = self.dice.choice(("({} // {})", "({} // {})", "divmod({}, {})[0]"))
        return Value(form.format(a.text, divisor), a.most)

    def _remainder(self, names: Names, depth: int) -> Value:
        a, by = self.whole(names, depth), self.dice.choice((-1000, -7, -3, -1, 1, 2, 5, 97, 1 << 33))
        form = self.dice.choice(("({} % {})", "({} % {})", "divmod({}, {})[1]"))
        return Value(form.format(a.text, by), abs(by))

    def _bits(self, names: Names, depth: int) -> Value:
        a, b = self._two(names, depth)
        most = min(WIDEST, 2 * max(a.most, b.most) + 2)
        return Value(f"({a.text} {self.dice.choice('&|^')} {b.text})", most)

    def _shift(self, names: Names, depth: int) -> Value:
        a, by = self.whole(names, depth), self.whole(names, depth)
        if self.dice.random() < 0.5:
            return Value(f"({a.text} >> ({by.text} & 63))", a.most)
        a = self.within(a, 1 << 31)
        return Value(f"({a.text} << ({by.text} & {self.dice.choice((1, 7, 15, 31))}))", a.most * (1 << 31))

    def _sign(self, names: Names, depth: int) -> Value:
        a = self.within(self.whole(names, depth), WIDEST)
        return Value(self.dice.choice(("(-{})", "(~{})", "abs({})", "(+{})")).format(a.text), a.most + 1)

    def _least(self, names: Names, depth: int) -> Value:
        parts = [self.whole(names, depth) for _ in range(self.dice.choice((2, 2, 3)))]
        text = ", ".join(part.text for part in parts)
        return Value(f"{self.dice.choice(('min', 'max'))}({text})", max(part.most for part in parts))

    def _branch(self, names: Names, depth: int) -> Value:
        a, b = self._two(names, depth)
        form = self.dice.choice(("({a} if {c} else {b})", "({a} if {c} else {b})", "({a} and {b})", "({a} or {b})"))
        return Value(form.format(a=a.text, b=b.text, c=self.truth(names, depth)), max(a.most, b.most))

    def _called(self, names: Names, depth: int) -> Value:
        if self.tables and (not self.helpers or self.dice.random() < 0.4):
            table, length = self.dice.choice(self.tables)
            return Value(f"{table}[{self.below(length, names, depth)}]", LOCAL)
        if not self.helpers:
            return self._leaf(names)
        a, b = self._two(names, depth, LOCAL)
        return Value(self.dice.choice(self.helpers).format(a.text, b.text), LOCAL)

    def _converted(self, names: Names, depth: int) -> Value:
        if self.dice.random() < 0.4:
            return Value(f"int({self.truth(names, depth)})", 1)
        real = self.real(names, depth)
        if real.most >= EXACT:
            real = Value(f"max(-1e6, min(1e6, {real.text}))", 1e6)
        return Value(f"{self.dice.choice(('int', 'round'))}({real.text})", real.most + 1)

    # floats

    def real(self, names: Names, depth: int = 2) -> Value:
        """A finite float."""
        if depth <= 0 or self.dice.random() < 0.2:
            return self._real_leaf(names)
        a, b = self.real(names, depth - 1), self.real(names, depth - 1)
        made = self.dice.randrange(7)
        if made == 0:
            return Value(f"({a.text} {self.dice.choice('+-')} {b.text})", a.most + b.most)
        if made == 1 and a.most * b.most < 1e200:
            return Value(f"({a.text} * {b.text})", a.most * b.most)
        if made == 2:
            return Value(f"({a.text} / (1.0 + abs({b.text})))", a.most)
        if made == 3:
            return Value(f"math.sqrt(abs({a.text}))", a.most + 1)
        if made == 4:
            return Value(f"{self.dice.choice(('min', 'max'))}({a.text}, {b.text})", max(a.most, b.most))
        if made == 5:
            return Value(f"({a.text} if {self.truth(names, 1)} else {b.text})", max(a.most, b.most))
        n = self.within(self.whole(names, depth - 1), 1 << 31)
        return Value(f"({n.text} / {self.dice.choice((-3, 2, 7, 0.1))})", n.most * 10)

    def _real_leaf(self, names: Names) -> Value:
        if names.reals and self.dice.random() < 0.6:
            return self.dice.choice(names.reals)
        return Value(self.dice.choice(("0.1", "-2.5", "1e-9", "3.0", "-0.0", "0.30000000000000004")), 3)

    def strange_real(self, names: Names) -> str:
        """A float that may be none, without end or minus nought."""
        odd = self.dice.choice(("NAN", "INF", "-INF", "-0.0", "(INF - INF)", "5e-324", "1e308 * 10.0", *names.odd))
        real = self.real(names, 1).text
        forms = ("{o}", "({o} if {c} else {r})", "min({r}, {o})", "max({o}, {r})", "({r} + {o})")
        return self.dice.choice(forms).format(o=odd, r=real, c=self.truth(names, 1))

    # truth

    def truth(self, names: Names, depth: int = 2) -> str:
        """A condition, True or False."""
        made = self.dice.randrange(8 if depth > 0 else 2)
        a, b = self._two(names, max(0, depth - 1))
        sign = self.dice.choice(("<", "<=", ">", ">=", "==", "!="))
        if made in (0, 1):
            return f"({a.text} {sign} {b.text})"
        if made == 2:
            return f"({a.text} < {b.text} <= {self.whole(names, 0).text})"
        if made == 3:
            return f"({self.real(names, 1).text} {sign} {self.strange_real(names)})"
        if made == 4:
            return f"(not {self.truth(names, depth - 1)})"
        if made == 5:
            return f"({self.truth(names, depth - 1)} {self.dice.choice(('and', 'or'))} {self.truth(names, depth - 1)})"
        if made == 6:
            return f"bool({a.text})"
        return f"({self.below(6, names, 1)} in (1, 4, 5))"


def optional_in(text: str) -> frozenset[str]:
    """Return the entries of OPTIONAL that a text reads."""
    columns = {name for name in OPTIONAL if f'["{name}"]' in text}
    return frozenset(columns | {name for name in OPTIONAL if f"step.{name}" in text})


#: How far columns of the tables can be from 0.
NOW_WHOLES = dict.fromkeys(("pass", "layer", "step", "phase", "tokens", "gated", "request", "absent"), LOCAL)
NOW_WHOLES |= dict.fromkeys(("clock", "position", "layers", "experts", "k", "precisions"), LOCAL)
NOW_WHOLES |= {"seed": WIDEST}
EXPERT_WHOLES = dict.fromkeys(("layer", "last_use", "last_pass", "uses_ever", "uses_here", "needed"), LOCAL)
EXPERT_WHOLES |= dict.fromkeys(("prediction_pass", "last_prediction"), LOCAL)
EXPERT_WHOLES |= {"mass_ever": 1 << 45, "next_use": NEVER + 1, "next_pass": NEVER + 1, "profile": NEVER + 1}
COPY_WHOLES = dict.fromkeys(("state", "protected", "pool", "entered", "prefetched", "lower", "bytes"), LOCAL)
