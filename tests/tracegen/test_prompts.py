"""Prompt sets: what each kind of file gives, what is said of a broken one, and how texts become tokens."""

import gzip
import hashlib
import json
import sys
from itertools import product
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import polars as pl
import pytest
from hypothesis import given
from hypothesis import strategies as st

from moereplay.tracegen import prompts, tokens
from moereplay.tracegen.errors import RecordError
from moereplay.tracegen.prompts import Prompts, read_dataset, read_prompts, read_texts
from moereplay.tracegen.tokens import Room, encode, windows
from tests.kit.every import every
from tests.kit.tiny_checkpoints import CHARACTERS, character_tokenizer

ROOM = Room(context=64, vocabulary=96)
PLAIN = character_tokenizer()
OPENING = character_tokenizer(opening=True)
CHAT = "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}{% if add_generation_prompt %}[bot]{% endif %}"


def written(folder: Path, name: str, content: str | bytes) -> Path:
    path = folder / name
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return path


def ids(text: str) -> list[int]:
    """By hand: a character's place in the tokenizer's alphabet."""
    return [1 + CHARACTERS.index(each) for each in text]


# Files


def test_every_kind_of_file_gives_the_same_prompts(tmp_path):
    texts = ["one", 'two, "quoted"', "three\nlines\nhere"]
    rows = [{"q": text, "n": number} for number, text in enumerate(texts)]
    lines = "\n".join(json.dumps(row) for row in rows) + "\n\n"
    pl.DataFrame(rows).write_csv(tmp_path / "a.csv")
    pl.DataFrame(rows).write_parquet(tmp_path / "a.parquet")
    written(tmp_path, "a.jsonl", "\ufeff" + lines)
    written(tmp_path, "b.jsonl.gz", gzip.compress(lines.encode()))
    for name in ("a.csv", "a.parquet", "a.jsonl", "b.jsonl.gz"):
        read = read_prompts([tmp_path / name], "q")
        assert read.texts == tuple(texts)
        assert read.name == name


def test_a_text_file_holds_a_prompt_per_line_and_blank_lines_are_none(tmp_path):
    path = written(tmp_path, "a.txt", "one\r\n\n  two\n")
    assert read_prompts([path]).texts == ("one", "  two")


def test_files_are_read_one_after_the_other_and_repeats_are_kept(tmp_path):
    paths = [written(tmp_path, "a.txt", "one\ntwo\n"), written(tmp_path, "b.txt", "one\n")]
    places = tuple(f"{tmp_path}/{place}" for place in ("a.txt, line 1", "a.txt, line 2", "b.txt, line 1"))
    assert read_prompts(paths) == Prompts("a.txt+b.txt", ("one", "two", "one"), places)


def test_a_field_may_reach_into_a_record(tmp_path):
    row = {"turns": ["first", "second"], "a": {"b": "inner"}, "a.b": "plain"}
    path = written(tmp_path, "a.jsonl", json.dumps(row))
    assert read_prompts([path], "turns.1").texts == ("second",)
    assert read_prompts([path], "a.b").texts == ("plain",)  # a field of that very name comes first


def test_the_only_field_needs_no_name(tmp_path):
    assert read_prompts([written(tmp_path, "a.jsonl", '{"p": "x"}')]).texts == ("x",)


def test_separators_that_json_holds_as_they_are_end_no_line(tmp_path: Path) -> None:
    path = written(tmp_path, "a.jsonl", '{"p": "one\u2028two\x85"}\n{"p": "three"}\n')
    assert read_prompts([path]).texts == ("one\u2028two\x85", "three")


HEADING = "Type,Category,Question,Best Answer,Correct Answers,Source"
CODE = 'def double(x: int) -> int:\n    """Twice x.\n    >>> double(2)\n    4\n    """\n'
#: Two records in the form of each published set; the field, and its texts.
PUBLISHED_FORMS = {
    "gsm8k.jsonl": (
        r'{"question": "Ann\u2019s hens lay 3 eggs.  How many in 2 days?", "answer": "3*2 = <<3*2=6>>6\n#### 6"}'
        "\n" + r'{"question": "A coat costs $80,000 \u00f7 2?", "answer": "#### 40000"}' + "\n",
        "question",
        ("Ann\u2019s hens lay 3 eggs.  How many in 2 days?", "A coat costs $80,000 \u00f7 2?"),
    ),
    "truthfulqa.csv": (
        f'{HEADING}\r\nAdversarial,Myths,Can pigs fly?,No,"No; They cannot, as a rule",https://a.example/b\r\n'
        'Adversarial,Sayings,"What does ""a pig in a poke"" mean, literally?",A pig in a bag,A pig,\r\n',
        "Question",
        ("Can pigs fly?", 'What does "a pig in a poke" mean, literally?'),
    ),
    "humaneval.jsonl": (
        "\n".join(json.dumps({"task_id": f"Ours/{n}", "prompt": CODE * n, "test": "pass"}) for n in (1, 2)),
        "prompt",
        (CODE, CODE * 2),
    ),
    "mt_bench.jsonl": (
        '{"question_id": 81, "category": "writing", "turns": ["Write it.", "Write it again."], "reference": []}\n'
        '{"question_id": 82, "category": "maths", "turns": ["Add 1.", "Add 2."], "reference": ["2", "4"]}\n',
        "turns.0",
        ("Write it.", "Add 1."),
    ),
    "nq_open.jsonl": (
        '{"question": "who was first", "answer": ["A", "B"]}\n{"question": "when was it", "answer": ["1616"]}\n',
        "question",
        ("who was first", "when was it"),
    ),
}


@every("packed, name", product([False, True], PUBLISHED_FORMS), apart=True)
def test_files_in_the_form_of_published_prompt_sets_are_read(tmp_path, name, packed):
    content, field, texts = PUBLISHED_FORMS[name]
    packing = (f"{name}.gz", gzip.compress(content.encode())) if packed else (name, content.encode())
    assert read_prompts([written(tmp_path, *packing)], field).texts == texts


BROKEN = [
    ("a.jsonl", '{"q": "x", "r": "y"}', "nope", r"line 1: unknown field 'nope': it has q, r"),
    ("a.jsonl", '{"q": "x", "r": "y"}', None, r"--field.* q, r"),
    ("a.jsonl", '{"q": "x"}\n{"q": ', "q", r"a\.jsonl, line 2: invalid JSON"),
    ("a.jsonl", '{"q": "x"}\n[1]', "q", r"line 2: invalid list"),
    ("a.jsonl", '{"q": "x"}\n\n{"q": " "}', "q", r"line 3: prompt 2 is empty"),
    ("a.jsonl", '{"q": 7}', "q", r"field 'q' is int, expected text or token ids"),
    ("a.jsonl", '{"q": ["x"]}', "q", r"field 'q' is list, expected text or token ids, reach into it with dots"),
    ("a.jsonl", '{"q": [1]}\n{"q": []}', "q", r"a\.jsonl, line 2: prompt 2 is empty: expected at least one token"),
    (
        "a.jsonl",
        '{"q": [1]}\n\n{"q": [1, -1]}',
        "q",
        r"a\.jsonl, line 3: invalid token id -1 in q\.1: expected a whole",
    ),
    ("a.jsonl", '{"q": [1.0]}', "q", r"line 1: invalid token id 1\.0 in q\.0"),
    ("a.jsonl", '{"q": [1, true]}', "q", r"line 1: invalid token id True in q\.1"),
    ("a.jsonl", '{"q": [1, "x"]}', "q", r"line 1: invalid token id 'x' in q\.1"),
    ("a.jsonl", '{"q": ["x"]}', "q.1", r"'q.1'.* '1'"),
    ("a.jsonl", "\n\n", "q", r"a\.jsonl holds no prompts"),
    ("a.jsonl", "[" * 100_000, "q", r"line 1: invalid JSON"),
    ("a.csv", "q,r\nx,y\n", "nope", r"a\.csv: unknown field 'nope': it has q, r"),
    ("a.csv", "q,r\nx\n", "r", r"row 1: field 'r' is NoneType, expected text"),
    ("a.csv", 'q\n"x', "q", r"a\.csv, line \d: invalid CSV"),
    ("a.csv", "", "q", r"unknown field 'q': it has none"),
    ("a.parquet", "no", "q", r"a\.parquet: not a Parquet file"),
    ("a.txt", "", None, r"a\.txt holds no prompts"),
    ("a.txt", "x", "q", r"--field cannot be combined with plain text .*a\.txt"),
    ("a.txt", b"caf\xe9", None, r"a\.txt is not UTF-8 \(byte 3\)"),
    ("a.txt.gz", b"no", None, r"a\.txt\.gz .*not a gzip file"),
    ("a.txt.gz", gzip.compress(b"some text that is long enough")[:-9], None, r"is cut short, or not a gzip file"),
    ("a.doc", "x", None, r"a\.doc: \.doc is not one of \.jsonl, \.csv, \.parquet, \.txt"),
]


@every("name, content, field, said", BROKEN, apart=True)
def test_a_broken_file_is_named_with_the_place_and_the_fix(tmp_path, name, content, field, said):
    with pytest.raises(RecordError, match=said) as raised:
        read_prompts([written(tmp_path, name, content)], field)
    assert "\n" not in str(raised.value)


def test_a_missing_file_and_a_folder_are_named(tmp_path):
    (tmp_path / "b.txt").mkdir()
    with pytest.raises(RecordError, match=r"a\.txt does not exist"):
        read_prompts([tmp_path / "a.txt"])
    with pytest.raises(RecordError, match=r"b\.txt is a folder"):
        read_texts([tmp_path / "b.txt"])


def test_an_empty_text_is_named(tmp_path):
    with pytest.raises(RecordError, match=r"a\.txt is empty"):
        read_texts([written(tmp_path, "a.txt", " \n")])


# What is recorded


def test_the_hash_is_of_the_list_that_is_recorded():
    texts = Prompts("a", ("x", "y"))
    assert texts.sha256 == hashlib.sha256(b'["x","y"]').hexdigest()
    assert texts.chosen(limit=1).sha256 == hashlib.sha256(b'["x"]').hexdigest()


def test_the_order_changes_only_if_shuffled_and_then_by_the_seed():
    texts = Prompts("a", tuple(map(str, range(50))))
    assert texts.chosen().texts == texts.texts
    first, again, other = (texts.chosen(seed).texts for seed in (1, 1, 2))
    assert first == again != other
    assert sorted(first) == sorted(texts.texts) != list(first)
    assert texts.chosen(1, 7).texts == first[:7]


# Datasets


def installed(monkeypatch, load_dataset, version="5.2.0"):
    """As if `datasets` were there: it is optional, and its own tests are its own."""
    monkeypatch.setitem(sys.modules, "datasets", SimpleNamespace(load_dataset=load_dataset, __spec__=object()))
    monkeypatch.setattr(prompts, "version", lambda _: version)


class Rows(list):
    column_names = ["question", "answer"]


def test_a_dataset_is_read_by_split_and_field(monkeypatch, tmp_path):
    (tmp_path / "here").mkdir()
    asked = []
    rows = Rows([{"question": "x", "answer": "1"}, {"question": "y", "answer": "2"}])
    installed(monkeypatch, lambda source, split: asked.append((source, split)) or rows)
    assert read_dataset("owner/name:train", "question")[:2] == ("owner/name:train", ("x", "y"))
    assert read_dataset("owner/name", "question").name == "owner/name:test"
    assert asked == [("owner/name", "train"), ("owner/name", "test")]
    assert read_dataset(f"{tmp_path}/here", "question").name == "here:test"  # no path of this machine
    with pytest.raises(RecordError, match=r"--dataset owner/name: unknown field 'q': it has question, answer"):
        read_dataset("owner/name", "q")


def test_without_the_package_or_the_network_a_dataset_says_what_to_do(monkeypatch):
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(RecordError, match=r"needs datasets: pip install datasets, or pass a file of it with --prompts"):
        read_dataset("owner/name", "q")

    def unreachable(source, split):
        raise ConnectionError("no\nroute")

    installed(monkeypatch, unreachable)
    with pytest.raises(RecordError, match=r"no route; without a network, copy its \.jsonl or \.parquet file here"):
        read_dataset("owner/name", "q")


def test_a_datasets_package_that_could_run_a_datasets_code_is_refused(monkeypatch):
    installed(monkeypatch, lambda source, split: Rows(), version="3.6.0")
    with pytest.raises(RecordError, match="datasets below 4 can run a dataset's own code"):
        read_dataset("owner/name", "question")


# Tokens


def test_prompts_become_the_tokenizers_ids():
    work = encode(Prompts("a", ("ab", "c")), PLAIN, ROOM, new=4)
    assert [each.tolist() for each in work.sequences] == [ids("ab"), ids("c")]
    assert all(each.dtype == np.int32 for each in work.sequences)
    assert work.prompts == f"a: 2 prompts, sha256 {Prompts('a', ('ab', 'c')).sha256}"


def test_token_ids_are_recorded_as_they_are(tmp_path):
    """No opening token is added, and an error names the line, also of a set that was shuffled."""
    rows = [{"ids": ids("ab"), "n": 1}, {"ids": [81, 1], "n": 2}]
    path = written(tmp_path, "a.jsonl", "\n\n".join(map(json.dumps, rows)))
    pl.DataFrame(rows).write_parquet(tmp_path / "b.parquet")
    read = read_prompts([path, tmp_path / "b.parquet"], "ids")
    work = encode(read, OPENING, ROOM, new=4)
    assert [each.tolist() for each in work.sequences] == [ids("ab"), [81, 1]] * 2
    assert work.prompts == f"a.jsonl+b.parquet: 4 prompts of token ids, sha256 {read.sha256}"
    (cut,) = encode(Prompts("a", (tuple(range(1, 81)),), ("a",)), OPENING, ROOM, new=4, truncate=True).sequences
    assert cut.tolist() == list(range(20, 81))  # 61 of them fit, and it does not begin with the opening token
    shuffled = read.chosen(2)
    assert shuffled.places != read.places
    assert dict(zip(shuffled.places, shuffled.texts, strict=True)) == dict(zip(read.places, read.texts, strict=True))
    said = "line 3: invalid token id 81 .number 1.: expected 0 to 79, as the vocabulary of the model has 80"
    with pytest.raises(RecordError, match=said):
        encode(read, PLAIN, Room(64, 80), new=4)
    with pytest.raises(RecordError, match="line 1: --chat cannot be combined with token ids"):
        encode(read, character_tokenizer(template="{{ messages }}"), ROOM, new=4, chat=True)


def test_the_tokenizers_own_opening_token_is_kept():
    (sequence,) = encode(Prompts("a", ("ab",)), OPENING, ROOM, new=4).sequences
    assert sequence.tolist() == [0, *ids("ab")]


def test_chat_puts_the_prompt_into_the_template():
    tokenizer = character_tokenizer(template=CHAT)
    work = encode(Prompts("a", ("hi",)), tokenizer, ROOM, new=4, chat=True)
    assert work.sequences[0].tolist() == ids("[user]hi[bot]")
    assert "as chat" in work.prompts


def test_a_template_that_prints_the_date_prints_the_same_one_every_day():
    tokenizer = character_tokenizer(template="{{ strftime_now('%Y-%m-%d') }} {{ messages[0].content }}")
    (sequence,) = encode(Prompts("a", ("hi",)), tokenizer, ROOM, new=4, chat=True).sequences
    assert sequence.tolist() == ids(f"{tokens.CHAT_DATE} hi")


def test_a_template_that_fails_is_refused_and_cannot_reach_out():
    for template in ("{{ raise_exception('only two roles') }}", "{{ ''.__class__.__mro__[1].__subclasses__() }}"):
        with pytest.raises(RecordError, match="--chat: the checkpoint's chat template failed: "):
            encode(Prompts("a", ("hi",)), character_tokenizer(template=template), ROOM, new=4, chat=True)


def test_chat_without_a_template_is_refused():
    with pytest.raises(RecordError, match="no chat template; omit --chat"):
        encode(Prompts("a", ("hi",)), PLAIN, ROOM, new=4, chat=True)


def test_a_prompt_fits_if_all_but_its_last_new_token_do():
    """P prompt tokens and N new ones put P + N - 1 through the model: 61 + 4 - 1 = 64."""
    encode(Prompts("a", ("x" * 61,)), PLAIN, ROOM, new=4)
    with pytest.raises(RecordError, match=r"prompt 2 has 62 tokens, with 4 new ones .* context of 64; use --truncate"):
        encode(Prompts("a", ("x", "y" * 62)), PLAIN, ROOM, new=4)
    encode(Prompts("a", ("y" * 9999,)), PLAIN, Room(None, 96), new=4)  # a config without a limit


def test_truncation_keeps_the_opening_token_and_the_end():
    text = "".join(CHARACTERS[1 + at % 90] for at in range(100))
    (plain,) = encode(Prompts("a", (text,)), PLAIN, ROOM, new=4, truncate=True).sequences
    (opened,) = encode(Prompts("a", (text,)), OPENING, ROOM, new=4, truncate=True).sequences
    assert plain.tolist() == ids(text)[-61:]
    assert opened.tolist() == [0, *ids(text)[-60:]]


def test_what_the_model_cannot_take_is_refused():
    with pytest.raises(RecordError, match="--max-new-tokens 65: the model's context is 64"):
        encode(Prompts("a", ("x",)), PLAIN, ROOM, new=65)
    with pytest.raises(RecordError, match=r"gives token 90; .* 50; .*tokenizer belongs to another model"):
        encode(Prompts("a", (CHARACTERS[89],)), PLAIN, Room(64, 50), new=1)
    with pytest.raises(RecordError, match="prompt 2 is empty"):
        encode(Prompts("a", ("x", "")), PLAIN, ROOM, new=1)
    with pytest.raises(RecordError, match="no prompts to run"):
        encode(Prompts("a", ()), PLAIN, ROOM, new=1)


# Windows


@given(
    text=st.text(alphabet="ab\n", min_size=1, max_size=200),
    width=st.integers(2, 20),
    piece=st.integers(1, 50),
    opening=st.booleans(),
)
def test_windows_are_the_text_in_order_without_gaps(text, width, piece, opening):
    tokenizer, kept = (OPENING, tokens.PIECE) if opening else (PLAIN, tokens.PIECE)
    step = width - opening
    tokens.PIECE = piece  # a text longer than a piece is tokenised in several
    try:
        if len(text) < step:
            with pytest.raises(RecordError, match=r"text 1 has \d+ tokens, less than one --window"):
                windows(Prompts("a", (text,)), tokenizer, ROOM, width)
            return
        work = windows(Prompts("a", (text,)), tokenizer, ROOM, width)
    finally:
        tokens.PIECE = kept
    assert [len(each) for each in work.sequences] == [width] * (len(text) // step)
    assert all(each[:opening].tolist() == [0] * opening for each in work.sequences)
    assert np.concatenate([each[opening:] for each in work.sequences]).tolist() == ids(text)[: len(text) // step * step]


def test_windows_do_not_reach_over_texts_and_end_at_the_limit():
    texts = Prompts("a+b", ("aaaaa", "bbbbb"))
    work = windows(texts, PLAIN, ROOM, 2)
    assert [each.tolist() for each in work.sequences] == [ids("aa")] * 2 + [ids("bb")] * 2
    assert work.prompts == f"a+b: 4 windows of 2, sha256 {texts.sha256}"
    assert len(windows(texts, PLAIN, ROOM, 2, limit=3).sequences) == 3
    assert len(windows(texts, PLAIN, ROOM, 2, limit=2).sequences) == 2


def test_a_window_fits_the_context_and_holds_text():
    with pytest.raises(RecordError, match="--window 65 exceeds the model's context of 64"):
        windows(Prompts("a", ("x" * 99,)), PLAIN, ROOM, 65)
    with pytest.raises(RecordError, match="--window 1 has no room for text"):
        windows(Prompts("a", ("x" * 99,)), OPENING, ROOM, 1)
    with pytest.raises(RecordError, match=r"text 2 has 3 tokens, less than one --window of 4"):
        windows(Prompts("a", ("x" * 9, "xxx")), PLAIN, ROOM, 4)
