"""Random policy files, kind by kind: what each kind decides."""

from __future__ import annotations

from random import Random

from moereplay.policies.contract import KEY_SCOPES
from tests.kit.strange_expressions import LOCAL, WIDEST, Names, Value
from tests.kit.strange_files import KEYED, ROWS, Author, File, Sort, X, of_now, tables

#: Columns of `now` that an honest key may read, by `key_scope`, from the narrowest scope on.
CONSTANT = ("layers", "experts", "k", "precisions", "seed")
OF_A_PASS = ("pass", "phase", "request", "tokens", "clock", "position")
OF_A_STEP = ("layer", "step", "gated")
TIMESTAMPS = {"last_use": f'experts[{X}]["last_use"]', "entered": 'copies[y]["entered"]'}


class EvictionAuthor(Author):
    """By key, by queue or by a hook that selects victims."""

    def hooks_of_kind(self) -> None:
        self.needs |= {"weights", "logits"} if self.dice.random() < 0.3 else set()
        self.needs |= {"future"} if self.dice.random() < 0.2 else set()
        made = self.dice.random()
        if made < 0.15:
            self._queue_key()
        elif made < 0.4 and not self.silent:
            self._victim()
        else:
            self._key()
        if self.dice.random() < (0.1 if self.silent else 0.35):
            self._admit()

    def _queue_key(self) -> None:
        timestamp = self.dice.choice(tuple(TIMESTAMPS))
        self.declared["queue"] = f'lambda p: "{timestamp}"'
        self._define("key", Names(()), f"return {TIMESTAMPS[timestamp]}", writes="none")

    def _key(self) -> None:
        scope = self.dice.choice(KEY_SCOPES)
        self.declared["key_scope"] = self.dice.choice((f'"{scope}"', f'lambda p: "{scope}"'))
        names = self._key_names(scope) if self.honest else self._names(X, "y")
        if scope == "layer" and self.honest:
            moves = Names((*of_now(*CONSTANT, *OF_A_PASS, *OF_A_STEP), Value(f'experts[{X}]["layer"]', LOCAL)))
            stays = self.write.within(self.write.whole(names), 1 << 60).text
            return self._define("key", names, f"return {stays} + {self._moving(moves)}", writes="none")
        return self._define("key", names, f"return {self.write.whole(names).text}", writes="none")

    def _moving(self, names: Names) -> str:
        return self.write.within(self.write.whole(names), 1 << 60).text

    def _key_names(self, scope: str) -> Names:
        """Return names whose values are constant within the scope, except for events of the copy or its expert."""
        now = (*CONSTANT, *(OF_A_PASS if scope != "touch" else ()), *(OF_A_STEP if scope == "step" else ()))
        mine = [
            value for value in tables(X, "y") if '["state"]' not in value.text and '["protected"]' not in value.text
        ]
        wholes = [*of_now(*now), *mine, Value(f"own.rows[y][{KEYED}]", WIDEST), Value("y", 999)]
        wholes += [Value("own.capacity[-1]", LOCAL)]
        reals = self._par()
        if scope == "step":
            wholes.append(Value(f"own.regs[-1][{KEYED}]", WIDEST))
            reals.append(Value(f"own.reals[0][{KEYED}]", 99))
        return Names(tuple(wholes), tuple(reals))

    def _victim(self) -> None:
        """The members of the pool stand in column 2 of `own.rows`; the best by any reading is evicted."""
        self.free = range(1, ROWS - 1)
        self._define("on_insert", self._names(X, "y"), f"own.rows[y][{ROWS - 1}] = HIGHEST - 5", writes="none")
        self._define(
            "on_evict", self._names(X, "y"), f"own.rows[y][{ROWS - 1}] = 0", "own.regs[0][1] = y", writes="copy"
        )
        names = self._names("expert_of(now, z)", "z").plus(Value("z", 999), Value("y_in", 999), Value("pool", 9))
        score = self.write.whole(names).text
        sign = self.dice.choice(("<", "<=", ">", ">="))
        ending = (
            "best, found = 0, -1",
            self.dice.choice(("for z in range(len(copies)):", "for z in range(len(copies) - 1, -1, -1):")),
            f'    if own.rows[z][{ROWS - 1}] != HIGHEST - 5 or copies[z]["pool"] != pool or copies[z]["protected"]:',
            "        continue",
            f"    score = {score}",
            f"    if found < 0 or score {sign} best:",
            "        best, found = score, z",
            "return found",
        )
        self._define("victim", Names((Value("y_in", 999), Value("pool", 9))), *ending, writes="victim")

    def _admit(self) -> None:
        always = self.dice.random() < 0.4
        names = self._names("expert_of(now, y_out)", "y_in").plus(Value("y_in", 999), Value("prefetched", 1))
        answer = "True" if always else self.write.truth(names)
        if self.dice.random() < 0.5:
            answer = f"bool({answer}) or {self.dice.choice(('y_in', 'y_out'))} % 3 > 0"
        if self.dice.random() < 0.4:
            self.declared["decides_once"] = "True"
        if always and self.honest:
            self.declared["declines"] = "lambda p: False"
        self._define("admit", names, f"return {answer}", writes="none" if always and self.honest else "free")


class PrefetchAuthor(Author):
    """By anything that can be read at a gate."""

    def hooks_of_kind(self) -> None:
        names = self._names("x", "z", at_gate=True).plus(Value("x", 999), Value("z", 999))
        if self.dice.random() < 0.6:
            self.needs |= {"lookahead"}
            self.declared["depth"] = f"lambda p: {self.dice.choice((1, 2))}"
            at = "[0][0]"
            names = names.plus(
                Value(f"step.look_order{at}[x % now['experts']]", 99), Value(f"step.look_score{at}[-1]", 1 << 25),
                Value("len(step.look_order)", 9),
            )  # fmt: skip
        if self.dice.random() < 0.3:
            self.declared["reach"] = f"lambda p: {self.dice.randrange(4)}"
        if self.dice.random() < (0.05 if self.silent else 0.3):
            self.declared["side_slots"] = f"lambda p: {self.dice.randrange(3)}"
            self.declared["side_inside"] = f"lambda p: {self.dice.random() < 0.5}"
        self.declared["renews_queue"] = str(self.dice.random() < 0.3)
        self._suggest(names)

    def _suggest(self, names: Names) -> None:
        most = self.dice.choice((1, 2, 5, 99))
        ending = (
            "count, first = 0, (now['layer'] + 1) * now['experts']",
            f"if len(out) > 0 and {self.dice.choice(('True', 'out[0] % 3 > 0', 'out[-1] == 0'))}:",
            "    b = out[0]",
            self.dice.choice(
                ("for x in range(first, len(experts)):", "for x in range(len(experts) - 1, first - 1, -1):")
            ),
            "    z = x * now['precisions']" + self.dice.choice(("", " + b % now['precisions']")),
            f"    if count < min({most}, len(out)) and {self.write.truth(names)}:",
            "        out[count] = z",
            "        count += 1",
            "return count",
        )
        self._define("suggest", self._names(at_gate=True), *ending)


class RoutingAuthor(Author):
    """Another choice wherever a condition holds."""

    def hooks_of_kind(self) -> None:
        self.needs |= {"logits", "weights"}
        self.declared["drops"] = str(self.dice.random() < 0.5)
        names = self._names("e", "e").plus(
            *(Value(text, 1 << 25) for text in ("step.gate[t][e]", "step.weight[t][j]", "e", "j", "t")),
            reals=[Value("step.logits[t][e]", 99), Value("step.choice[t][-1]", 99)],
        )
        other = "NONE" if self.declared["drops"] == "True" else "out[t][j]"
        ending = (
            "for t in range(now['tokens']):",
            "    for j in range(now['k']):",
            "        out[t][j] = step.ids[t][j]",
            "    for j in range(now['k']):",
            self.dice.choice(
                ("        for e in range(now['experts']):", "        for e in range(now['experts'] - 1, -1, -1):")
            ),
            "            taken = False",
            "            for i in range(now['k']):",
            "                if out[t][i] == e:",
            "                    taken = True",
            f"            if not taken and step.ids[t][j] >= 0 and {self.write.truth(names)}:",
            f"                out[t][j] = {self.dice.choice(('e', 'e', 'e', other))}",
        )
        self._define("choose", self._names(), *ending)


class MissAuthor(Author):
    """Any verdicts, and precisions."""

    def hooks_of_kind(self) -> None:
        self.needs |= {"weights", "logits"}
        self.declared["changes_output"] = "True"
        cpu, stands_in = self.dice.random() < 0.5, self.dice.random() < 0.5
        tiers = self.dice.choice(((), (), (8.0, 4.0), (8.0, 4.0, 2.0)))
        self.declared["bits"] = f"lambda p: {tiers}"
        self.declared["uses_cpu"] = f"lambda p: {cpu}"
        if self.dice.random() < 0.6:
            names = self._names(at_gate=True).plus(
                Value("n", 99), Value("step.rank[n]", 99), Value("step.mass[n]", LOCAL)
            )
            self._define("want", names, f"return {self.write.below(1 << 20, names)} % now['precisions']")
        if stands_in:
            self._stand_in()
        self._resolve(["0", "0", "DROP", *["CPU"] * cpu, *["PER_TOKEN"] * stands_in])

    def _stand_in(self) -> None:
        names = self._names("e", "e", at_gate=True).plus(
            *(Value(text, 1 << 25) for text in ("e", "t", "j", "step.gate[t][e]", "step.ids[t][j]", "eligible[-1]"))
        )
        ending = ("for e in range(len(eligible)):", f"    if eligible[e] == 1 and {self.write.truth(names)}:")
        self._define("substitute", self._names(at_gate=True), *ending, "        return e", "return NONE")

    def _resolve(self, verdicts: list[str]) -> None:
        names = self._names("step.expert[missing[m]]", "-1", at_gate=True).plus(
            Value("free", LOCAL), Value("m", 99), Value("missing[m]", 99), Value("step.mass[missing[m]]", LOCAL)
        )
        picked = [self.dice.choice(verdicts) for _ in range(3)]
        ending = (
            "for m in range(len(missing)):",
            f"    if {self.write.truth(names)}:",
            f"        verdict[m] = {picked[0]}",
            f"    elif {self.write.truth(names)}:",
            f"        verdict[m] = {picked[1]}",
            *(() if self.dice.random() < 0.3 else ("    else:", f"        verdict[m] = {picked[2]}")),
        )
        self._define("resolve", self._names(at_gate=True), *ending)


AUTHORS = {"routing": RoutingAuthor, "prefetch": PrefetchAuthor, "eviction": EvictionAuthor, "miss": MissAuthor}


def policy_file(dice: Random, kind: str, name: str, sort: Sort) -> File:
    """A file of that kind and sort."""
    return AUTHORS[kind](dice, kind, name, sort).file()
