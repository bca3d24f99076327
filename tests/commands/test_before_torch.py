"""Wrong options, missing files and unreadable traces are refused before torch is imported, which takes seconds."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from moereplay.traces.store import open_trace
from moereplay.traces.writer import write_trace

ROOT = Path(__file__).resolve().parents[2]
SAMPLE = ROOT / "traces" / "samples" / "miniature.zarr"

#: Runs each command line with a torch that cannot be imported: what asks for it is named instead of refused.
RUN = """
import json, shlex, sys
from importlib.machinery import ModuleSpec

class Refusing:
    def find_spec(self, name, path=None, target=None):
        return ModuleSpec(name, self) if name.partition(".")[0] in ("torch", "transformers") else None
    def create_module(self, spec):
        return None
    def exec_module(self, module):
        raise SystemError(f"asked for {module.__name__}")

sys.meta_path.insert(0, Refusing())
from tests.kit.command import moereplay_here
found = []
for line in json.load(sys.stdin):
    try:
        ended = moereplay_here(*shlex.split(line))
        found.append([ended.returncode, ended.stderr, ended.stdout])
    except SystemError as asked:
        found.append([str(asked), "", ""])
print(json.dumps(found))
"""

MEASURE = "measure miniature --slow-tier pinned"
RECORD = "record miniature --out new.zarr"
CALIBRATE = "calibrate machine --slow-tier pinned --model olmoe-1b-7b"
SWEEP = "sweep run good.toml --every 1"
TUNE = "tune good.toml --trials 1 --every 1"
QUALITY = "quality miniature --sets sets.toml --tasks perplexity:text.txt --out new"
#: Of settings that every verb has which replays.
SETTINGS = (
    ("--capacity abc", "invalid capacity 'abc'"),
    ("--eviction nope", "unknown eviction policy 'nope'"),
    ("--prefetch top_k:depth=100", "an integer from 1 to 8"),
    ("--miss nope", "unknown miss policy 'nope'"),
    ("--routing nope", "unknown routing policy 'nope'"),
    ("--preset nope", "unknown preset 'nope'"),
    ("--policy-file none.py", "none.py: No such file"),
    ("--nope", "unknown option"),
)
#: Of options that name a model's place.
PLACES = (
    ("--device gpu", "invalid --device"),
    ("--device cuda:x", "invalid --device"),
    ("--dtype int3", "unknown --dtype 'int3'"),
    ("--device-map balanced --quantise nope", "--quantise 'nope'"),
)
#: (what is typed, what the last line says) by the verb that needs torch.
WRONG: dict[str, list[tuple[str, str]]] = {
    "measure": [
        ("measure none.zarr --slow-tier pinned", "none.zarr does not exist"),
        ("measure text.txt --slow-tier pinned", "text.txt is a file"),
        ("measure empty.zarr --slow-tier pinned", "empty.zarr"),
        ("measure miniature", "missing --slow-tier"),
        ("measure miniature --slow-tier nope", "--slow-tier 'nope'"),
        ("measure miniature --slow-tier disk:", "--slow-tier 'disk:'"),
        ("measure miniature --slow-tier disk:text.txt", "text.txt is not a folder"),
        *((f"{MEASURE} {more}", said) for more, said in SETTINGS),
        (f"{MEASURE} --throttle abc", "invalid --throttle 'abc'"),
        (f"{MEASURE} --device gpu", "invalid --device 'gpu'"),
        (f"{MEASURE} --platform phone-ufs4", "--platform"),
        (f"{MEASURE} --decisions nope", "unknown --decisions 'nope'"),
        (f"{MEASURE} --tokens 100000", "first request has 103"),
        (f"{MEASURE} --layers 100", "at most 16"),
        (f"{MEASURE} --out text.txt", "text.txt is not a folder"),
        (f"{MEASURE} --warm none.json", "--warm none.json: No such file"),
    ],
    "validate": [
        ("validate none.zarr", "none.zarr does not exist"),
        ("validate text.txt", "text.txt is a file"),
        ("validate empty.zarr", "empty.zarr"),
        *((f"validate miniature {more}", said) for more, said in SETTINGS),
        ("validate miniature --device gpu", "invalid --device"),
        ("validate miniature --quantiser afine", "unknown quantiser 'afine': did you mean affine?"),
        ("validate miniature --dtype int3", "unknown --dtype 'int3'"),
        ("validate miniature --model /none/there", "does not exist"),
        ("validate miniature --model text.txt", "text.txt is a file"),
        ("validate miniature --sets none.toml", "none.toml: No such file"),
        ("validate miniature --sets text.txt", "text.txt"),
        ("validate miniature --eviction belady", "needs the future"),
        ("validate miniature --platform nope", "unknown platform 'nope'"),
        ("validate elsewhere.zarr", "'mine'; pass --model"),
        ("validate miniature --requests 0", "--requests"),
        ("validate miniature --out text.txt", "text.txt is not a folder"),
    ],
    "quality": [
        (f"{QUALITY} --sets none.toml", "none.toml: No such file"),
        (f"{QUALITY} --sets text.txt", "text.txt"),
        ("quality miniature --sets sets.toml --tasks gsm8k", "missing --out"),
        (f"{QUALITY} --tasks ,", "missing tasks"),
        (f"{QUALITY} --tasks perplexity:none.txt", "missing file none.txt"),
        (f"{QUALITY} --tasks perplexity:", "missing file name"),
        (f"{QUALITY} --tasks perplexity:.", ". is a folder: expected a file"),
        (f"{QUALITY} --tasks perplexity:text.txt,perplexity:text.txt", "perplexity:text.txt twice"),
        (f"{QUALITY} --tasks none.yaml", "missing file none.yaml"),
        (f"{QUALITY.replace('miniature', '/none/there')}", "does not exist"),
        (f"{QUALITY.replace('miniature', 'text.txt')}", "text.txt is a file"),
        (f"{QUALITY} --revision nope", "a Hugging Face id"),
        (f"{QUALITY} --window 1", "--window"),
        (f"{QUALITY} --shots -1", "--shots"),
        (f"{QUALITY} --seed -1", "--seed"),
        (f"{QUALITY} --nope", "unknown option"),
        (f"{QUALITY} --limit 0", "--limit"),
        (f"{QUALITY} --batch 0", "--batch"),
        (f"{QUALITY} --out text.txt", "text.txt is not a folder"),
        *((f"{QUALITY} {more}", said) for more, said in PLACES),
    ],
    "live": [
        ("live /none/there --text text.txt", "does not exist"),
        ("live text.txt --text text.txt", "text.txt is a file"),
        ("live miniature --prompts none.jsonl", "none.jsonl does not exist"),
        ("live miniature --text none.txt", "none.txt does not exist"),
        ("live miniature --trace none.zarr", "none.zarr does not exist"),
        ("live miniature --trace text.txt", "text.txt is a file"),
        ("live miniature --trace empty.zarr", "empty.zarr"),
        ("live miniature --text text.txt --trace miniature", "--text"),
        *((f"live miniature {more}", said) for more, said in (*SETTINGS, *PLACES)),
        ("live miniature --capacity 5%,9%", "expand to 2"),
        ("live miniature --quantiser afine", "unknown quantiser 'afine': did you mean affine?"),
        ("live miniature --eviction belady", "needs the future"),
        ("live bare --text text.txt", "bare has no tokenizer"),
        ("live miniature --platform a100", "unknown platform 'a100'"),
        ("live miniature --text text.txt --record text.txt", "text.txt exists"),
        ("live miniature --look-ahead 100", "invalid --look-ahead 100: miniature has 16 layers"),
        ("live miniature --events e", "invalid --events e: expected a name that ends in .parquet or .csv"),
        ("live miniature --field nope", "unknown field 'nope'"),
        ("live miniature --window 3", "--window cannot be combined with --prompts"),
        ("live miniature --revision nope", "a Hugging Face id"),
        ("live miniature --slow-tier nope", "--slow-tier 'nope'"),
        ("live miniature --slow-tier disk:text.txt", "text.txt is not a folder"),
        ("live miniature --slow-tier pinned --device mps", "invalid --device 'mps'"),
        ("live miniature --throttle 4MB/s", "--throttle requires --slow-tier"),
        ("live miniature --slow-tier pinned --throttle 4MB", "invalid --throttle '4MB'"),
        ("live miniature --slow-tier pinned --platform phone-ufs4", "--platform cannot be combined with --slow-tier"),
        ("live miniature --slow-tier pinned --device-map auto", "--device-map cannot be combined with --slow-tier"),
        (
            "live miniature --slow-tier pinned --routing cache_prior",
            "routing cache_prior, miss fetch",
        ),
        ("live miniature --slow-tier pinned --miss drop", "routing standard, miss drop"),
        ("live miniature --text text.txt --max-new-tokens 3", "--max-new-tokens cannot be combined with --text"),
        ("live miniature --preset specmd-1,specmd-4", "expand to 2"),
        ("live miniature --events text.txt/e.csv", "text.txt is not a folder"),
    ],
    "record": [
        ("record miniature", "missing --out"),
        ("record /none/there --text text.txt --out new.zarr", "does not exist"),
        ("record text.txt --text text.txt --out new.zarr", "text.txt is a file"),
        ("record miniature --out text.txt", "text.txt exists"),
        ("record miniature --out text.txt/new.zarr", "text.txt is not a folder"),
        *((f"{RECORD} {more}", said) for more, said in PLACES),
        (f"{RECORD} --text none.txt", "none.txt does not exist"),
        (f"{RECORD} --prompts none.jsonl", "none.jsonl does not exist"),
        (f"{RECORD} --prompts good.toml", ".toml is not one of"),
        (f"{RECORD} --prompts text.txt --text text.txt", "--text"),
        (f"{RECORD} --text text.txt --field x", "--field cannot be combined with --text"),
        (f"{RECORD} --text text.txt --window 8 --prompt-tokens 9", "exceeds --window 8"),
        (f"{RECORD} --field nope", "unknown field 'nope'"),
        (f"{RECORD} --top-p .5", "require --temperature"),
        (f"{RECORD} --temperature 1 --top-p 5", "--top-p: expected at most 1"),
        (f"{RECORD} --revision nope", "a Hugging Face id"),
        (f"{RECORD} --look-ahead -1", "--look-ahead"),
        (f"{RECORD} --look-ahead 16", "invalid --look-ahead 16: miniature has 16 layers"),
        (f"{RECORD} --dtype Float32", "unknown --dtype 'Float32': did you mean float32"),
        (f"{RECORD.replace('miniature', 'bare')} --text text.txt", "has no tokenizer, text cannot be read without one"),
        (f"{RECORD.replace('miniature', 'headless')} --text text.txt", "no config.json"),
        (f"{RECORD.replace('miniature', 'weightless')} --text text.txt", "model.safetensors is missing"),
        (f"{RECORD} --limit 0", "--limit"),
        (f"{RECORD} --max-new-tokens 0", "--max-new-tokens"),
        (f"{RECORD} --nope", "unknown option"),
    ],
    "calibrate": [
        ("calibrate machine", "--slow-tier"),
        ("calibrate machine --slow-tier pinned", "--model"),
        ("calibrate machine --slow-tier nope --model olmoe-1b-7b", "'nope'"),
        ("calibrate machine --slow-tier disk:text.txt --model olmoe-1b-7b", "text.txt"),
        ("calibrate machine --slow-tier pinned --model nope", "nope"),
        (f"{CALIBRATE} --fit x", "--fit"),
        (f"{CALIBRATE} --throttle abc", "--throttle 'abc'"),
        (f"{CALIBRATE} --throttle 0MB/s", "--throttle '0MB/s'"),
        (f"{CALIBRATE} --device gpu", "--device 'gpu'"),
        (f"{CALIBRATE} --device cuda:x", "--device 'cuda:x'"),
        (f"{CALIBRATE} --layers 1000", "16"),
        (f"{CALIBRATE} --layers 0", "--layers"),
        (f"{CALIBRATE} --threads 0", "--threads"),
        (f"{CALIBRATE} --out .", "folder"),
        (f"{CALIBRATE} --out text.txt/x.toml", "text.txt"),
        (f"{CALIBRATE} --nope", "unknown option"),
        ("calibrate logs none", "cannot read none"),
        ("calibrate logs .", "moereplay calibrate folder"),
        ("calibrate folder .", "--fit"),
        ("calibrate logs text.txt", "--model"),
    ],
    "sweep run --every": [
        ("sweep run none.toml --every 1 --slow-tier pinned", "none.toml"),
        ("sweep run text.txt --every 1 --slow-tier pinned", "text.txt"),
        ("sweep run lost.toml --every 1 --slow-tier pinned", "none.zarr"),
        ("sweep run good.toml --slow-tier pinned", "requires --every N"),
        (SWEEP, "one of --slow-tier"),
        (f"{SWEEP} --slow-tier pinned --live miniature", "one of --slow-tier"),
        (f"{SWEEP} --slow-tier nope", "--slow-tier 'nope'"),
        (f"{SWEEP} --slow-tier disk:text.txt", "text.txt is not a folder"),
        (f"{SWEEP} --slow-tier pinned --throttle abc", "invalid --throttle 'abc'"),
        (f"{SWEEP} --slow-tier pinned --device gpu", "invalid --device 'gpu'"),
        (f"{SWEEP} --slow-tier pinned --dtype float32", "--dtype cannot be combined with --slow-tier"),
        (f"{SWEEP} --slow-tier pinned --executor slurm", "--executor slurm"),
        (f"{SWEEP} --slow-tier pinned --out s3://bucket/name", "s3"),
        (f"{SWEEP} --slow-tier pinned --set base.eviction=nope", "unknown eviction policy 'nope'"),
        (f"{SWEEP} --slow-tier pinned --shard 3/2", "shard"),
        (f"{SWEEP} --slow-tier pinned --engine nope", "nope"),
        (f"{SWEEP} --live /none/there", "does not exist"),
        (f"{SWEEP} --live text.txt", "text.txt is a file"),
        (f"{SWEEP} --live miniature --device gpu", "invalid --device"),
        (f"{SWEEP} --live miniature --dtype int3", "unknown --dtype 'int3'"),
        (f"{SWEEP} --live miniature --throttle 4MB/s", "--throttle cannot be combined with --live"),
    ],
    "tune --every": [
        ("tune none.toml --every 1 --live miniature", "none.toml"),
        (f"{TUNE} --slow-tier nope", "--slow-tier 'nope'"),
        (f"{TUNE} --live miniature --device gpu", "invalid --device"),
    ],
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("wrong")
    (made / "text.txt").write_text("a text\n")
    (made / "empty.zarr").mkdir()
    (made / "good.toml").write_text(f'traces = ["{SAMPLE}"]\n[grid]\ncapacity = ["5%", "9%"]\n')
    (made / "sets.toml").write_text('[sets.lru]\neviction = "lru"\n')
    (made / "lost.toml").write_text('traces = ["none.zarr"]\n[grid]\ncapacity = ["5%", "9%"]\n')
    for name, missing in {
        "bare": "tokenizer.json",
        "headless": "config.json",
        "weightless": "model.safetensors",
    }.items():
        checkpoint_without(made / name, missing)
    trace = open_trace(SAMPLE)
    provenance = trace.header.provenance.model_copy(update={"model": "mine", "revision": ""})
    header = trace.header.model_copy(update={"provenance": provenance})
    write_trace(made / "elsewhere.zarr", header, [trace.request(0)], trace.router_bias)
    return made


def checkpoint_without(folder: Path, missing: str) -> None:
    """A checkpoint as far as no torch is needed to read it."""
    folder.mkdir()
    header = json.dumps({"w": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}).encode()
    files = {"config.json": b'{"model_type": "olmoe"}', "tokenizer.json": b"{}"}
    files["model.safetensors"] = len(header).to_bytes(8, "little") + header + bytes(4)
    for name, content in files.items():
        if name != missing:
            (folder / name).write_bytes(content)


@pytest.fixture(scope="module")
def refused(folder: Path) -> dict[str, list[tuple[int | str, str, str]]]:
    """Exit code, stderr and stdout of every command; one process, which takes a second to start, runs them all."""
    lines = [line for cases in WRONG.values() for line, _ in cases]
    command = [sys.executable, "-c", f"import sys; sys.path.insert(0, {str(ROOT)!r})\n{RUN}"]
    ran = subprocess.run(command, cwd=folder, input=json.dumps(lines), capture_output=True, text=True, check=True)
    found = iter(json.loads(ran.stdout))
    return {verb: [next(found) for _ in cases] for verb, cases in WRONG.items()}


@pytest.mark.slow
@pytest.mark.parametrize("verb", WRONG)
def test_what_is_wrong_is_refused_without_torch(
    verb: str, refused: dict[str, list[tuple[int | str, str, str]]]
) -> None:
    for (line, said), (code, stderr, stdout) in zip(WRONG[verb], refused[verb], strict=True):
        lines = [each for each in stderr.strip().splitlines() if not each.startswith("experts: ")]
        assert (code, stdout) == (2, "") and said in lines[-1], (line, code, stderr)
        assert len(lines) == 1 or not lines[-1].startswith("moereplay: "), (line, stderr)
