"""Files of torch.save, read without torch: the same documents and numbers as torch reads, and nothing is run."""

from __future__ import annotations

import io
import os
import tracemalloc
from collections import OrderedDict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moereplay.traces.importers import torch_file
from moereplay.traces.importers.sources import refuse_unreadable
from moereplay.traces.importers.torch_file import Archive, Tensor
from moereplay.traces.schema import TraceError
from tests.kit.collecting import Lazily
from tests.kit.torch_pickles import archive, named, plain, tensor

if TYPE_CHECKING:
    import torch
else:
    torch = Lazily("torch")

DTYPES = [
    "float32",
    "float64",
    "float16",
    "bfloat16",
    "int64",
    "int32",
    "int16",
    "int8",
    "uint8",
    "bool",
    "uint16",
    "uint32",
    "uint64",
]


def saved(path: Path, document: Any, **options: Any) -> Path:
    torch.save(document, path, **options)
    return path


def refusal(path: Path) -> str:
    """The line with which a document is refused."""
    with pytest.raises(TraceError) as refused:
        Archive(path)
    assert "\n" not in str(refused.value)
    assert len(str(refused.value)) < 1000 + len(str(path))
    return str(refused.value)


def arrays_of(value: Any) -> Any:
    """The document with arrays for tensors."""
    if isinstance(value, Tensor):
        return value.array()
    if isinstance(value, dict):
        return {key: arrays_of(each) for key, each in value.items()}
    return type(value)(arrays_of(each) for each in value) if isinstance(value, list | tuple) else value


def assert_same(found: Any, expected: Any) -> None:
    if isinstance(expected, torch.Tensor):
        wanted = expected.detach().float() if expected.dtype == torch.bfloat16 else expected.detach()
        assert found.dtype == wanted.numpy().dtype
        np.testing.assert_array_equal(found, wanted.numpy())
        assert not found.flags.writeable or expected.dtype == torch.bfloat16
    elif isinstance(expected, dict):
        assert list(found) == list(expected)
        for key, value in expected.items():
            assert_same(found[key], value)
    elif isinstance(expected, list | tuple):
        assert isinstance(found, list | tuple) and len(found) == len(expected)
        for one, other in zip(found, expected, strict=True):
            assert_same(one, other)
    else:
        assert type(found) is type(expected) and (found == expected or expected != expected)


# ---------------------------------------------------------------- torch itself is the oracle


@st.composite
def tensors(draw: st.DrawFn) -> torch.Tensor:
    """Of any type, and perhaps a view: a part, every other one, axes exchanged, repeated without copies."""
    dtype = getattr(torch, draw(st.sampled_from(DTYPES)))
    shape = draw(st.lists(st.integers(0, 4), max_size=3))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 99)))
    whole = torch.randint(0, 2 if dtype == torch.bool else 100, shape, generator=generator).to(dtype)
    views = [lambda t: t, lambda t: t.t() if t.dim() == 2 else t, lambda t: t[1:] if t.dim() else t]
    views += [lambda t: t[..., ::2] if t.dim() else t, lambda t: t.unsqueeze(0).expand(3, *t.shape)]
    return draw(st.sampled_from(views))(draw(st.sampled_from(views))(whole))


LEAVES = st.none() | st.booleans() | st.integers(-(2**63), 2**63 - 1) | st.floats() | st.text(max_size=8)
DOCUMENTS = st.recursive(
    LEAVES | st.binary(max_size=8) | tensors(),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.lists(inner, max_size=4).map(tuple)
        | st.dictionaries(st.text(max_size=4) | st.integers(-9, 9), inner, max_size=4)
    ),
    max_leaves=10,
)


@pytest.mark.slow
@given(document=DOCUMENTS, protocol=st.sampled_from([2, 3, 4, 5]))
@settings(max_examples=60, deadline=None)
def test_documents_are_those_that_torch_saved(
    document: Any, protocol: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    path = saved(tmp_path_factory.mktemp("torch") / "a.pt", document, pickle_protocol=protocol)
    assert_same(arrays_of(Archive(path).root), document)
    refuse_unreadable(path)


def test_tensors_that_share_a_storage_are_views_of_it(tmp_path: Path) -> None:
    whole = torch.arange(24).reshape(2, 3, 4)
    document = {"a": whole, "b": whole[1], "c": whole.permute(2, 0, 1), "d": whole[:, 1:, ::3]}
    root = Archive(saved(tmp_path / "a.pt", document)).root
    assert_same(arrays_of(root), document)
    assert {value.layout.key for value in root.values()} == {"0"}


def test_other_values_that_torch_files_hold(tmp_path: Path) -> None:
    document = {
        "size": torch.Size([2, 3]),
        "ordered": OrderedDict(x=1, y=[2]),
        "scalar": np.float32(0.5),
        "count": np.int64(7),
        "parameter": torch.nn.Parameter(torch.ones(2, dtype=torch.bfloat16)),
        "empty": torch.zeros(0, 3),
        "number": torch.tensor(3.5),
    }
    root = arrays_of(Archive(saved(tmp_path / "a.pt", document)).root)
    assert (root["size"], root["ordered"], root["scalar"], root["count"]) == ((2, 3), {"x": 1, "y": [2]}, 0.5, 7)
    np.testing.assert_array_equal(root["parameter"], np.ones(2, np.float32))
    assert root["empty"].shape == (0, 3) and root["number"].item() == 3.5


def test_a_list_of_many_numbers_is_read(tmp_path: Path) -> None:
    numbers = [3, 300, 70_000, -1, 2**40] * 2000
    assert Archive(saved(tmp_path / "a.pt", {"positions": numbers})).root == {"positions": numbers}


# ---------------------------------------------------------------- what would run, or is not a trace


class Runs:
    """Pickled as a call."""

    def __init__(self, function: Any, *arguments: Any) -> None:
        self.call = (function, arguments)

    def __reduce__(self) -> Any:
        return self.call


def test_what_is_more_than_data_is_refused_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for value, name in [
        (Runs(os.system, "touch ran"), "posix.system"),
        (Runs(eval, "1"), "__builtin__.eval"),
        (Runs(open, "ran", "w"), "io.open"),
        ({1, 2}, "__builtin__.set"),
        (np.arange(3), "numpy._core.multiarray._reconstruct"),
        (torch.zeros(2, dtype=torch.complex64), "torch.ComplexFloatStorage"),
        (torch.nn.Linear(2, 2), "torch.nn.modules.linear.Linear"),
        (torch.zeros(2, 2).to_sparse(), "torch._utils._rebuild_sparse_tensor"),
        (2**90, "an integer of 12 bytes"),
        ({(1, 2): 3}, "a key that is a tuple"),
    ]:
        monkeypatch.chdir(tmp_path)
        said = refusal(saved(tmp_path / "a.pt", {"a": [value]}))
        assert f"{name} is not loaded" in said
        assert "numbers, strings, lists, dicts and tensors" in said
        assert not (tmp_path / "ran").exists()


def test_a_function_that_may_be_named_is_no_value_that_can_be_called_otherwise(tmp_path: Path) -> None:
    assert "a call of int" in refusal(archive(tmp_path / "a.pt", b"\x80\x02K\x01)R."))
    assert "a call of torch.FloatStorage" in refusal(
        archive(tmp_path / "a.pt", named("torch", "FloatStorage") + b")R.")
    )
    assert "the state of an object" in refusal(archive(tmp_path / "a.pt", b"}}b."))
    assert "opcode INST" in refusal(archive(tmp_path / "a.pt", b"(ios\nsystem\n."))
    assert "opcode EXT1" in refusal(archive(tmp_path / "a.pt", b"\x82\x01."))


# ---------------------------------------------------------------- claims that are not true


def test_a_tensor_that_its_storage_cannot_hold_is_refused(tmp_path: Path) -> None:
    for program, expected in [
        (tensor((2, 3), (3, 1)), "reaches beyond the 16 bytes of its storage"),
        (tensor((4,), (1,), at=1), "reaches beyond"),
        (tensor((2,), (2**62,)), "reaches beyond"),
        (tensor((4,), (-1,), at=3), "has impossible sizes or strides"),
        (tensor((-4,), (1,)), "has impossible sizes or strides"),
        (tensor((4,), (1,), at=-1), "has impossible sizes or strides"),
        (tensor((2, 2), (1,)), "has impossible sizes or strides"),
        (tensor((1,) * 40, (1,) * 40), "has impossible sizes or strides"),
        (tensor((2**62, 2**62), (0, 0)), "repeats its storage more than 100 times"),
        (tensor((4,), (1,), numel=5), "claims another size than the 16 bytes of its storage"),
        (tensor((4,), (1,), numel=-4), "claims another size"),
        (tensor((4,), (1,), kind="Double"), "claims another size"),
        (tensor((4,), (1,), key="1"), "missing data/1"),
        (tensor((4,), (1,), key="../../data.pkl"), "missing data/../../data.pkl"),
        (tensor(["x"], (1,)), "broken"),
        (tensor((1.0,), (1,)), "broken"),
        (tensor((True,), (1,)), "broken"),
    ]:
        assert expected in refusal(archive(tmp_path / "a.pt", program + b".", d0=b"\0" * 16))


def test_a_view_that_repeats_a_little_is_read(tmp_path: Path) -> None:
    root = Archive(archive(tmp_path / "a.pt", tensor((3, 4), (0, 1)) + b".", d0=b"\0" * 16)).root
    assert root.array().tolist() == [[0.0] * 4] * 3


def test_one_tensor_named_often_is_counted_each_time(tmp_path: Path) -> None:
    opened = Archive(saved(tmp_path / "a.pt", [torch.zeros(250_000)] * 400))
    with pytest.raises(TraceError, match="its tensors are more than 100 times the file"):
        torch_file.refuse_bloat(opened, opened.root)
    torch_file.refuse_bloat(opened, opened.root[:90])


# ---------------------------------------------------------------- bombs


def bounded(path: Path, most: float = 10e6) -> str:
    tracemalloc.start()
    said = refusal(path)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < most
    return said


def test_lists_within_lists_a_hundred_thousand_deep_are_read_without_recursion(tmp_path: Path) -> None:
    deep = Archive(archive(tmp_path / "a.pt", b"]" * 10**5 + b"a" * (10**5 - 1) + b".")).root
    assert len(deep) == 1


def test_a_list_that_holds_itself_twice_over_is_neither_walked_nor_shown(tmp_path: Path) -> None:
    bomb = b"]q\x00K\x01a" + b"".join(b"](h%ch%ceq%c" % (at, at, at + 1) for at in range(200))
    root = Archive(archive(tmp_path / "a.pt", bomb + b".")).root
    assert len(root) == 2
    assert "a call of list" in refusal(archive(tmp_path / "a.pt", bomb + b")R."))
    assert "a key that is a list" in refusal(archive(tmp_path / "a.pt", bomb + b"}h\xc8K\x01s."))
    assert "broken" in refusal(archive(tmp_path / "a.pt", bomb + b"Q."))


def test_a_key_whose_hash_would_take_for_ever_is_refused(tmp_path: Path) -> None:
    """Each tuple holds the one before twice, and hashes are not kept: 2 ** 200 steps."""
    bomb = b")q\x00" + b"".join(b"(h%ch%ctq%c" % (at, at, at + 1) for at in range(200))
    assert len(Archive(archive(tmp_path / "a.pt", bomb + b".")).root) == 2
    for key in (b"h\xc8", b"h\xc8N\x85", b"h\xc8q\x05h\x05"):
        for pair in (b"}" + key + b"K\x01s.", b"}(K\x01K\x02" + key + b"K\x01u."):
            assert "a key that is a tuple" in refusal(archive(tmp_path / "a.pt", bomb + pair))
    assert "the state of an object" in refusal(archive(tmp_path / "a.pt", bomb + b"}h\xc8NbK\x01s."))


def test_a_memo_index_that_no_pickler_writes_is_refused_before_a_memo_is_made(tmp_path: Path) -> None:
    assert "broken at byte" in bounded(archive(tmp_path / "a.pt", b"Nr\xff\xff\xff\x3f."), 5e6)
    assert Archive(archive(tmp_path / "a.pt", b"Nr\x01\x00\x00\x00.")).root is None


def test_a_text_that_is_encoded_again_and_again_is_refused(tmp_path: Path) -> None:
    """A pickler encodes bytes once and names the result."""
    text = b"X" + (10**6).to_bytes(4, "little") + b"a" * 10**6 + b"q\x00"
    encoded = named("_codecs", "encode") + b"h\x00" + plain("latin1")[:-2] + b"\x86R"
    assert len(Archive(archive(tmp_path / "a.pt", b"](" + text + encoded + b"e.")).root) == 2
    assert "broken" in bounded(archive(tmp_path / "a.pt", b"](" + text + encoded * 50 + b"e."))
    assert "broken" in refusal(archive(tmp_path / "a.pt", named("torch", "Size") + b"(" + b"K\x01" * 99 + b"t\x85R."))


def test_a_pickle_cannot_change_a_tensor_after_its_check(tmp_path: Path) -> None:
    for target in [tensor((4,), (1,)), tensor((4,), (1,))[:-1] + b"Rq\x00h\x00"]:
        for state in [plain({"layout": None}), plain((None, {"layout": None}))]:
            assert "broken" in refusal(archive(tmp_path / "a.pt", target + state + b"b.", d0=b"\0" * 16))


def test_a_pickle_cannot_change_what_it_may_call(tmp_path: Path) -> None:
    for name in [named("torch._utils", "_rebuild_tensor_v2"), b"X\x05\0\0\0torchX\x04\0\0\0Size\x93"]:
        state = plain((None, {"__defaults__": (1,)}))
        assert "the state of an object" in refusal(archive(tmp_path / "a.pt", name + state + b"b."))


def test_more_opcodes_than_a_recording_has_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("moereplay.traces.importers.torch_file.MOST_STEPS", 1000)
    assert "more than 1,000 opcodes" in refusal(archive(tmp_path / "a.pt", b"]" * 5000))


def test_a_pickle_that_is_too_large_is_refused_unread(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch_file, "MOST_PICKLE", 10_000)
    assert "more than 10,000 bytes of data.pkl" in refusal(archive(tmp_path / "a.pt", b"N" * 20_000))


def test_packed_members_are_refused_unpacked(tmp_path: Path) -> None:
    path = archive(tmp_path / "a.pt", tensor((4,), (1,), numel=10**7) + b".", packed=True, d0=b"\0" * (4 * 10**7))
    assert "compressed, which torch.save never does" in bounded(path)


def test_a_claim_of_many_bytes_is_refused_before_anything_is_allocated(tmp_path: Path) -> None:
    path = archive(tmp_path / "a.pt", tensor((2**40,), (1,), numel=2**40) + b".", d0=b"\0" * 16)
    assert "claims another size" in bounded(path, 5e6)
    path = archive(tmp_path / "a.pt", b"X\xff\xff\xff\xff.")
    assert "broken at byte" in bounded(path, 5e6)


# ---------------------------------------------------------------- damage


def document() -> dict[str, Any]:
    return {
        "records": [{"ids": torch.arange(12).reshape(3, 4), "positions": list(range(40)), "mode": 1}] * 2,
        "weights": torch.rand(5, 3).bfloat16(),
    }


def test_a_file_cut_anywhere_is_refused_and_a_flipped_bit_lies_where_nothing_is_read(tmp_path: Path) -> None:
    torch.manual_seed(0)
    wanted = document()
    path = saved(tmp_path / "a.pt", wanted)
    whole = path.read_bytes()
    for at in range(0, len(whole), 13):
        path.write_bytes(whole[:at])
        refusal(path)
        path.write_bytes(whole[:at] + bytes([whole[at] ^ 1 << at % 8]) + whole[at + 1 :])
        try:
            assert_same(arrays_of(Archive(path).root), wanted)
        except TraceError as refused:
            assert "\n" not in str(refused)


@given(
    program=st.binary(max_size=60)
    | st.lists(
        st.sampled_from(
            [bytes([code]) for code in (*range(128, 150), *b"()t]}aesuRbQ02N")]
            + [
                b"K\x01",
                b"h\0",
                b"q\0",
                plain("storage"),
                named("torch", "LongStorage"),
                tensor((2,), (2,)),
                named("numpy", "dtype"),
            ]
        ),
        max_size=30,
    ).map(b"".join)
)
@settings(max_examples=200, deadline=None)
def test_any_program_is_refused_in_one_line_or_is_data(
    program: bytes, tmp_path_factory: pytest.TempPathFactory
) -> None:
    path = archive(tmp_path_factory.mktemp("torch") / "a.pt", program + b".", d0=b"\0" * 16)
    try:
        Archive(path)
    except TraceError as refused:
        assert "\n" not in str(refused) and len(str(refused)) < 1000


# ---------------------------------------------------------------- other files


def test_files_of_old_torch_are_refused_with_what_to_do(tmp_path: Path) -> None:
    path = saved(tmp_path / "a.pt", document(), _use_new_zipfile_serialization=False)
    with pytest.raises(TraceError, match=r"before torch 1\.6"):
        refuse_unreadable(path)


def test_plain_pickles_are_refused_whatever_their_name(tmp_path: Path) -> None:
    stream = io.BytesIO()
    torch.save(document(), stream)
    for name in ("a.npz", "a.pkl", "a.csv"):
        (tmp_path / name).write_bytes(stream.getvalue())
        with pytest.raises(TraceError, match=r"pickled data|zip archive of archive/data\.pkl"):
            refuse_unreadable(tmp_path / name)


def test_big_endian_files_are_refused(tmp_path: Path) -> None:
    path = archive(tmp_path / "a.pt", b"N.")
    path.write_bytes(path.read_bytes().replace(b"little", b"bigbig"))
    assert "byteorder is damaged" in refusal(path)
    import zipfile

    with zipfile.ZipFile(tmp_path / "b.pt", "w") as opened:
        opened.writestr("x/data.pkl", b"N.")
        opened.writestr("x/byteorder", b"big")
    assert "big-endian machine" in refusal(tmp_path / "b.pt")
