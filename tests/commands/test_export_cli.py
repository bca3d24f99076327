"""`moereplay export`: what it prints, what it refuses, and that a shell takes its words as they are."""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path

from tests.kit.command import moereplay_here as moereplay
from tests.kit.command import unfolded
from tests.kit.every import every
from tests.kit.exporting import ALL


def test_the_list_has_every_format_and_its_options() -> None:
    ended = moereplay("export", "--list")
    assert ended.returncode == 0 and max(map(len, ended.stdout.splitlines())) <= 80
    assert all(re.search(rf"(?m)^{re.escape(exporter.name)} ", ended.stdout) for exporter in ALL)
    listed = json.loads(moereplay("export", "--list", "--json").stdout)
    assert [each["format"] for each in listed] == [exporter.name for exporter in ALL]


def test_json_says_what_was_written_and_what_was_left_out(tmp_path: Path) -> None:
    out = tmp_path / "a b.json"
    ended = moereplay("export", "miniature", "--format", "sglang", "--limit", 2, "--out", out, "--json")
    said = json.loads(ended.stdout)
    assert (said["format"], said["requests"], said["files"][0]["path"]) == ("sglang", 2, str(out))
    assert said["files"][0]["bytes"] == out.stat().st_size and "token_ids" in said["dropped_fields"]
    assert said["typed"].endswith(f"--init-expert-location '{out}'")


def test_what_was_assumed_and_left_out_is_printed_and_stdout_is_to_be_pasted(tmp_path: Path) -> None:
    out = tmp_path / "placement.args"
    ended = moereplay("export", "miniature", "--format", "llama.cpp", "--capacity", "30%", "--out", out)
    assert ended.stdout == f"llama-server -m MODEL.gguf -ngl 999 $(cat {out})\n"
    said = unfolded(ended.stderr)
    assert "note: the experts of 4 of 16 layers stay on the GPU" in said
    assert "not in llama.cpp: chosen, logits," in said and f"wrote {out}: 15 bytes" in said


def test_a_shell_takes_the_arguments_as_they_are(tmp_path: Path) -> None:
    out, ranking = tmp_path / "placement.args", tmp_path / "ranking.json"
    ranking.write_text("[[3, 0], [7, 1]]")
    words = ("--capacity", "30%", "--profile", ranking, "--out", out)
    assert moereplay("export", "miniature", "--format", "llama.cpp", *words).returncode == 0
    shell = subprocess.run(["bash", "-c", f'printf "%s\\n" $(cat {out})'], capture_output=True, text=True, check=True)
    assert shell.stdout.splitlines() == out.read_text().split()
    assert out.read_text().startswith(r"-ot blk\.(0|1|2|4|5|6|8|")


def test_the_memory_of_a_gpu_is_divided_as_recommend_does(tmp_path: Path) -> None:
    words = ("--format", "llama.cpp", "--vram", "600MB", "--out", tmp_path / "args")
    ended = moereplay("export", "miniature", *words)
    assert ended.returncode == 0, ended.stderr
    assert (tmp_path / "args").read_text() == "--n-cpu-moe 0\n"


@every(
    "words, said",
    [
        ((), "missing trace, --format or --out"),
        (("miniature", "--format", "llama.cpp", "--capacity", "30%", "--out", "-"), "standard output"),
        (("miniature", "--format", "csv"), "missing trace, --format or --out"),
        (("miniature", "--format", "CSV", "--out", "a.csv"), "did you mean csv?"),
        (("miniature", "--format", "csv", "--out", "a.txt"), "end it with .csv"),
        (
            ("miniature", "--format", "csv", "--out", "a.csv", "--layer", 1),
            "--layer cannot be combined with format csv",
        ),
        (("miniature", "--format", "hf", "--out", "a"), "format hf requires --licence"),
        (("miniature", "--format", "hf", "--out", "a", "--licence", "x: y"), "unknown licence 'x: y'"),
        (("miniature", "--format", "llama.cpp", "--out", "a"), "requires --capacity (or --vram)"),
        (
            ("miniature", "--format", "llama.cpp", "--out", "a", "--capacity", "1GB", "--vram", "1GB"),
            "--capacity cannot be combined with --vram",
        ),
        (("miniature", "--format", "llama.cpp", "--out", "a", "--capacity", "x"), "invalid capacity 'x'"),
        (("miniature", "--format", "csv", "--out", "a.csv", "--platform", "phone-ufs4"), "--platform requires --vram"),
        (("none.zarr", "--format", "csv", "--out", "a.csv"), "none.zarr does not exist"),
    ],
    apart=True,
)
def test_what_is_refused(words: tuple[object, ...], said: str, tmp_path: Path) -> None:
    ended = moereplay("export", *words, cwd=tmp_path)
    assert ended.returncode == 2 and said in unfolded(ended.stderr), ended.stderr
    assert list(tmp_path.iterdir()) == []
