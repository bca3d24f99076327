"""Platform files: what is read, written, laid over a base, changed in place and refused."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from moereplay.simulator.calibration import Calibration
from moereplay.simulator.errors import ConfigError
from moereplay.simulator.platform import Contention, Link, Measured, Platform
from moereplay.simulator.platforms import as_toml, platform, presets, sealed
from moereplay.traces.schema import Geometry
from tests.kit.every import every

TINY = Geometry(layers=2, experts=4, k=2, expert_bytes=(1000, 3000), expert_bits=16, dense_params=50, head_params=70)


def tiers(geometry: Geometry) -> tuple[tuple[int, ...], ...]:
    return (geometry.expert_bytes,)


def refusal(text: str) -> str:
    with pytest.raises(ConfigError) as refused:
        platform(text)
    assert "\n" not in str(refused.value)
    return str(refused.value)


PRICED = """name = "priced"
overlap = "none"
memory_bytes = 11.3e9
[link]
bytes_per_s = 2.1e9
latency_ns = 90_000
depth = 4
start_ns = 5
start_ns_per_mib = 370_000.5
reads = 3
by_size = [[65536, 0.9e9], [4194304, 2.1e9]]
first_piece = 0.667
[compute]
kind = "roofline"
flops = 0.5e12
memory_bytes_per_s = 21.7e9
expert_bytes_per_s = 15e9
by_tokens = [[1, 1.0], [8, 1.9], [64, 9.5]]
kv_bytes_per_s = 20e9
[compute.formats]
MXFP4 = 14e9
[compute.dense_formats]
Q8_0 = 25e9
[contention]
compute = 0.9
[loading]
gate_ns = 7
ns_per_expert = 8
ns_per_mib = 126_000
[calibration]
device = "a phone"
method = "means"
date = "2026-07-14"
cells = 8
mape = 0.071
"""


NEWER = ("link.start_ns_per_mib=0", "compute.expert_bytes_per_s=1e9", "compute.dense_formats.Q8_0=1e9")


def test_every_price_is_read_written_and_read_back(tmp_path: Path) -> None:
    machine = platform(written(tmp_path, PRICED))
    assert (machine.overlap, machine.memory_bytes, machine.loading.ns_per_mib) == ("none", 11.3e9, 126_000)
    assert platform(written(tmp_path, as_toml(machine))) == machine


def test_prices_count_for_identities_and_where_they_come_from_does_not(tmp_path: Path) -> None:
    whole = platform(written(tmp_path, PRICED))
    figures = whole.figures()
    for unsaid in ("calibration", "memory_bytes"):
        assert whole.model_copy(update={unsaid: None}).figures() == figures
    changes = ("overlap=arrival", "link.reads=1", "compute.kv_bytes_per_s=1e9", "loading.gate_ns=0")
    for change in (*changes, "link.first_piece=1", "contention.compute=1", "compute.formats.MXFP4=1e9", *NEWER):
        assert platform(f"{tmp_path}/mine.toml:{change}").figures() != figures


def test_a_price_that_is_not_said_is_in_no_figures() -> None:
    bare = platform("phone-ufs4")
    assert bare.figures() == {
        "link": {"bytes_per_s": 4.2e9, "latency_ns": 100_000, "depth": 1},
        "compute": {"kind": "roofline", "flops": 0.5e12, "memory_bytes_per_s": 50e9, "launch_ns": 5000},
        "cpu": None,
    }
    assert platform("phone-ufs4:loading.gate_ns=0:overlap=arrival:link.reads=1").figures() == bare.figures()


def test_a_calibration_is_not_of_other_figures(tmp_path: Path) -> None:
    mine = written(tmp_path, PRICED)
    (tmp_path / "other.toml").write_text('name = "other"\nbase = "mine.toml"\n[loading]\ngate_ns = 0\n')
    other = platform(str(tmp_path / "other.toml"))
    assert platform(mine).calibration is not None
    assert platform(f"{mine}:link.depth=1").calibration is other.calibration is None
    assert (other.loading.gate_ns, other.loading.ns_per_expert, other.memory_bytes) == (0, 8, 11.3e9)


def test_a_price_that_a_platform_does_not_say_may_be_set_in_place() -> None:
    mine = platform("phone-ufs4:loading.ns_per_mib=126000:overlap=none:link.start_ns=4:compute.kv_bytes_per_s=1e9")
    assert (mine.loading.ns_per_mib, mine.overlap, mine.links[0].start_ns) == (126_000, "none", 4)


@every(
    "old, new, said",
    [
        ('"none"', '"some"', "overlap: unknown value 'some': choose from none, arrival"),
        ("reads = 3", "reads = 0", "link.reads: expected at least 1 (got 0)"),
        ("[[65536, 0.9e9], [4194304", "[[65536, 0.9e9], [4096", "link.by_size: expected sizes that rise from point"),
        ("[[65536, 0.9e9]", "[[65536, inf]", "link.by_size.0.1: expected a finite number"),
        ("first_piece = 0.667", "first_piece = 1.5", "link.first_piece: expected at most 1 (got 1.5)"),
        ("[[1, 1.0]", "[[2, 1.0]", "by_tokens: expected [1, 1.0]"),
        ("[64, 9.5]", "[64, 1.5]", "by_tokens: expected times"),
        ("[64, 9.5]", "[8, 9.5]", "by_tokens: expected tokens that rise from point"),
        ("MXFP4", "MXPF4", "formats: unknown weight format 'MXPF4'; did you mean MXFP4?"),
        ("compute = 0.9", "compute = 0", "contention.compute: expected at least"),
        ("gate_ns = 7", "gate_ns = 7.5", "loading.gate_ns: expected a whole number"),
        ("\nns_per_mib", "\nns_per_mb", "loading.ns_per_mb: unknown key"),
        ('device = "a phone"\n', "", "calibration.device: missing"),
    ],
)
def test_a_wrong_price_is_refused_in_one_line(old: str, new: str, said: str, tmp_path: Path) -> None:
    assert old in PRICED
    assert said in refusal(written(tmp_path, PRICED.replace(old, new)))


FILE = """name = "mine"
[link]
bytes_per_s = 1e18
[compute]
kind = "measured"
expert_ns = 5
"""


def written(folder: Path, text: str) -> str:
    (folder / "mine.toml").write_text(text)
    return str(folder / "mine.toml")


def test_a_platform_may_be_a_file(tmp_path: Path) -> None:
    where = platform(written(tmp_path, FILE))
    assert (where.name, where.links[0].bytes_per_s, where.compute) == ("mine", 1e18, Measured(expert_ns=5))


def test_an_unknown_platform_names_the_nearest() -> None:
    assert "did you mean h100-pcie5?" in refusal("h100_pcie5")
    assert "pass a .toml file, or choose from " in refusal("quantum")


@every(
    "text, said",
    [
        ("name = ", "is not valid TOML"),
        (FILE.replace("1e18", "0"), "link.bytes_per_s: expected at least 1 (got 0)"),
        (FILE.replace("1e18", "nan"), "link.bytes_per_s"),
        (FILE.replace("expert_ns", "expert_nanoseconds"), "expert_nanoseconds: unknown key"),
        (FILE.replace("measured", "guessed"), "compute: unknown kind 'guessed': choose from 'roofline', "),
        (FILE.replace("[link]\nbytes_per_s = 1e18\n", ""), "link: missing"),
    ],
)
def test_a_wrong_platform_file_is_refused_in_one_line(tmp_path: Path, text: str, said: str) -> None:
    assert said in refusal(written(tmp_path, text))


def test_a_platform_file_that_is_not_there_is_refused(tmp_path: Path) -> None:
    assert "cannot read platform file" in refusal(str(tmp_path / "absent.toml"))


def test_a_platform_file_that_is_no_text_is_refused(tmp_path: Path) -> None:
    (tmp_path / "mine.toml").write_bytes(b"\xff\xfe")
    assert "is not valid TOML: 'utf-8' codec can't decode byte" in refusal(str(tmp_path / "mine.toml"))


# files that extend others, and files that are written


def extending(folder: Path, text: str) -> str:
    (folder / "base.toml").write_text(as_toml(platform("rtx4090-pcie4")))
    (folder / "mine.toml").write_text(text)
    return str(folder / "mine.toml")


@every("base", ["rtx4090-pcie4", "base.toml"])
def test_a_file_lays_its_figures_over_those_of_its_base(base: str, tmp_path: Path) -> None:
    mine = platform(extending(tmp_path, f'name = "mine"\nbase = "{base}"\n[link]\nbytes_per_s = 1e9\n'))
    old = platform("rtx4090-pcie4")
    assert mine.name == "mine"
    assert mine.links[0] == old.links[0].model_copy(update={"bytes_per_s": 1e9})
    assert (mine.compute, mine.cpu) == (old.compute, old.cpu)
    assert mine.source.startswith("own figures; the others of ") and mine.source.endswith(old.source)


def test_a_table_of_another_kind_replaces_that_of_the_base(tmp_path: Path) -> None:
    text = 'name = "mine"\nbase = "phone-ufs4"\n[compute]\nkind = "measured"\nexpert_ns = 7\n'
    assert platform(extending(tmp_path, text)).compute == Measured(expert_ns=7)


def test_several_links_replace_the_one_of_the_base(tmp_path: Path) -> None:
    rows = "[[links]]\nbytes_per_s = 1e9\n[[links]]\nbytes_per_s = 2e9\n"
    mine = platform(extending(tmp_path, f'name = "mine"\nbase = "phone-ufs4"\n{rows}'))
    assert [link.bytes_per_s for link in mine.links] == [1e9, 2e9]


def test_a_file_that_extends_itself_is_refused_by_its_chain(tmp_path: Path) -> None:
    (tmp_path / "other.toml").write_text('name = "o"\nbase = "mine.toml"\n')
    mine = extending(tmp_path, 'name = "m"\nbase = "other.toml"\n')
    with pytest.raises(ConfigError, match=r"extends itself: .*mine\.toml -> .*other\.toml -> .*mine\.toml; remove one"):
        platform(mine)


@every(
    "text, said",
    [
        ('base = "phone-ufs4"\n', "name: missing"),
        ('name = "m"\nbase = "fone-ufs4"\n', "unknown platform 'fone-ufs4': did you mean phone-ufs4?"),
        ('name = "m"\nbase = "absent.toml"\n', "cannot read platform file"),
        ('name = "m"\nbase = 3\n', "invalid base 3: expected the name of a preset or a .toml file"),
        ('name = "m"\nbase = "phone-ufs4"\n[link]\nspeed = 1\n', "link.speed"),
    ],
)
def test_what_is_wrong_with_a_base_is_said(text: str, said: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=re.escape(said)):
        platform(extending(tmp_path, text))


def calibrated(folder: Path, change: tuple[str, str] = ("", "")) -> Platform:
    """A platform with a sealed calibration, read from a file in which one text was replaced by another."""
    about = Calibration(device="desk", cells=3, mape=0.05)
    machine = Platform(name="m", links=(Link(bytes_per_s=2.5e9),), compute=Measured(expert_ns=7), calibration=about)
    text = as_toml(sealed(machine))
    assert change[0] in text
    (folder / "m.toml").write_text(text.replace(*change))
    return platform(str(folder / "m.toml"))


def test_a_sealed_calibration_is_kept_by_its_file(tmp_path: Path) -> None:
    found = calibrated(tmp_path)
    assert found.calibrated is not None and not found.is_edited
    assert found.calibrated.in_one_line() == "desk, 3 runs, mean error 5.0%"


@every("change", [("2500000000.0", "2600000000.0"), ("expert_ns = 7", "expert_ns = 8"), ("mape = 0.05", "mape = 0.01"),
     ("cells = 3", "cells = 30"), ('device = "desk"', 'device = "farm"'), ('digest = "', 'digest = "0')])  # fmt: skip
def test_a_platform_that_was_edited_after_its_calibration_is_not_called_calibrated(
    change: tuple[str, str], tmp_path: Path
) -> None:
    found = calibrated(tmp_path, change)
    assert found.is_edited and found.calibrated is None


def test_names_and_remarks_may_be_edited(tmp_path: Path) -> None:
    assert calibrated(tmp_path, ('name = "m"', 'name = "mine"')).calibrated is not None


def test_a_calibration_without_a_digest_says_so(tmp_path: Path) -> None:
    digest = sealed(calibrated(tmp_path)).calibration
    assert digest is not None
    found = calibrated(tmp_path, (f'digest = "{digest.digest}"\n', ""))
    assert found.calibrated is not None and "no digest" in found.calibrated.in_one_line()


@every("machine", presets())
def test_what_is_written_reads_back_as_the_same_machine(machine: Platform, tmp_path: Path) -> None:
    (tmp_path / "written.toml").write_text(as_toml(machine))
    assert platform(str(tmp_path / "written.toml")) == machine


def test_several_links_and_strange_names_are_written_too(tmp_path: Path) -> None:
    rows = (
        Link(bytes_per_s=1e18, share=1),
        Link.model_validate({"bytes_per_s": 5e9, "share": 0.5, "from": "NVMe"}),
    )
    machine = Platform(name='a "b"\x7f\n\u00e9', links=rows, compute=Measured(), contention=Contention(cpu=0.5))
    (tmp_path / "written.toml").write_text(as_toml(machine))
    assert platform(str(tmp_path / "written.toml")) == machine
