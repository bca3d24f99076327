"""A checkpoint's folder: locate it, check that it is complete, and hash its weights. Without torch.

Its files are untrusted data: safetensors headers are parsed here, pickled weights are rejected, nothing is executed.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

from moereplay.tracegen.errors import RecordError, require
from moereplay.traces.checkpoints.found import INDEX, header_length, shards_of
from moereplay.traces.checkpoints.found import WEIGHTS as WHOLE
from moereplay.traces.documents import DocumentError, content, from_json, refuse_irregular
from moereplay.traces.files import digest_of
from moereplay.traces.geometry import KnownModel, by_spelling
from moereplay.traces.network import snapshot
from moereplay.traces.schema import TraceError
from moereplay.traces.texts import meant

MINIATURE = Path(__file__).parent / "miniature"
WEIGHTS = "moereplay_miniature"  #: a separate distribution, so that the wheel stays small
HUB_ID = re.compile(r"[\w.-]+(/[\w.-]+)?")
#: The files of a hub repository that are read; subfolders repeat the weights in other formats.
READ = ["*.safetensors", "*.json", "*.jinja", "*.txt", "*.model", "*.tiktoken"]
NOT_READ = ["*/*", "consolidated*"]
#: Where vocabularies are; a tokenizer of bytes has none, and is named in its configuration.
TOKENIZERS = ("tokenizer*.json", "vocab*", "*.model", "*.tiktoken", "tekken.json", "*.spm")
WHOLE_HASH_BYTES = 8 * 2**30  #: a checkpoint above this is hashed by samples: reading it all would double loading
SAMPLES, SAMPLE_BYTES = 256, 2**16
MOST_JSON = 1 << 26  #: bytes: an index of a trillion parameters takes ten million, a tokenizer as much


class Folder(NamedTuple):
    """Path of a checkpoint, and its name in traces, which reveals no local path."""

    path: Path
    name: str
    revision: str  #: the hub's commit; empty for a local folder


def check_revision(source: str, revision: str | None) -> None:
    """Raise RecordError if a revision is passed for a source that has none."""
    if revision and (source == "miniature" or Path(source).expanduser().is_dir()):
        raise RecordError(f"--revision requires a Hugging Face id, not {source}")


def locate(source: str, revision: str | None = None) -> Folder:
    """Locate `miniature`, a local folder or a Hugging Face id, which is downloaded if it is not cached.

    Raises RecordError for anything else, or if the hub refuses it or cannot be reached.
    """
    path = Path(source).expanduser()
    if source == "miniature":
        return _bundled()
    if path.is_dir():
        return Folder(path, path.resolve().name, "")
    if path.exists():
        raise RecordError(f"{source} is a file: expected the folder of a checkpoint with config.json and *.safetensors")
    if source.startswith(("http://", "https://")):
        raise RecordError(
            f"{source} is an address; to record, pass owner/name of the hub, or a folder with the weights"
        )
    if source.lower() in by_spelling() and "/" not in source:
        raise RecordError(_sizes_alone(by_spelling()[source.lower()]))
    if not HUB_ID.fullmatch(source) or source.startswith("."):
        raise RecordError(f"{source} does not exist: expected a folder, a Hugging Face id (owner/name) or `miniature`")
    if "/" not in source and (near := meant(source, (*by_spelling(), "miniature"))):
        raise RecordError(f"{source} does not exist: {near}Or pass a folder, or a Hugging Face id (owner/name)")
    return _fetched(source, revision)


def _sizes_alone(model: KnownModel) -> str:
    """Say where weights of a model are that is known by its sizes."""
    hub = next((alias for alias in model.aliases if "/" in alias), "")
    here = "the folder of its weights"
    return (
        f"{model.name} is known by its sizes, without weights; to record, pass {here}"
        + (f", or {hub}, which is downloaded" if hub else "")
        + f"; `moereplay recommend {model.name}` needs none"
    )


def located(source: str, revision: str | None = None) -> Folder:
    """Locate a checkpoint and run every check that does not need torch. Raises RecordError."""
    folder = locate(source, revision)
    _refuse_irregular(folder)
    read_config(folder)
    weight_files(folder)
    return folder


def _refuse_irregular(folder: Folder) -> None:
    """Raises RecordError for a pipe, a device or a folder where transformers would read a file."""
    for pattern in READ:
        for path in sorted(folder.path.glob(pattern)):
            try:
                refuse_irregular(path)
            except OSError as wrong:
                raise RecordError(f"{folder.name}: {path.name}: {wrong.strerror}; download it again") from None


def require_tokenizer(folder: Folder) -> None:
    """Raise RecordError for a checkpoint without a tokenizer: transformers would create an empty one."""
    if not any(path.match(pattern) for path in folder.path.iterdir() for pattern in TOKENIZERS):
        why = "text cannot be read without one"
        fix = "copy tokenizer.json and tokenizer_config.json of the model into it, or download it again"
        raise RecordError(f"{folder.name} has no tokenizer, {why}; {fix}")


def _bundled() -> Folder:
    weights = find_spec(WEIGHTS)
    for folder in (MINIATURE, *map(Path, (weights and weights.submodule_search_locations) or ())):
        if (folder / "model.safetensors").exists():
            return Folder(folder, "miniature", "")
    raise RecordError(
        "missing weights of the miniature: the wheel of moereplay comes without them; "
        "install the wheel moereplay_miniature of `make wheel`, or pass tracegen/miniature of a clone"
    )


def _fetched(source: str, revision: str | None) -> Folder:
    require("huggingface_hub", "a model from the Hugging Face hub", "pass a local folder")
    try:
        path = snapshot(source, "model", revision=revision, allow_patterns=READ, ignore_patterns=NOT_READ)
    except TraceError as refused:
        raise RecordError(str(refused)) from None
    return Folder(path, source, path.name)


def one_line(error: BaseException) -> str:
    """Return another library's error as one line of at most 200 characters."""
    words = " ".join(str(error).split())
    said = words if " " in words else f"{type(error).__name__} {words}".strip()
    return said if len(said) <= 200 else f"{said[:197]}..."


def read_config(folder: Folder) -> dict[str, Any]:
    """Return the checkpoint's config.json. Raises RecordError if it is missing, broken or names no model_type."""
    path = folder.path / "config.json"
    if not path.exists():
        raise RecordError(f"{folder.name} is not a transformers checkpoint (no config.json); check the path")
    config = _json(path, folder.name)
    if not isinstance(config.get("model_type"), str):
        raise RecordError(f"{folder.name} is not a transformers checkpoint: config.json has no model_type")
    return config


def check_look_ahead(folder: Folder, depth: int, usual: int = 0) -> None:
    """Raise RecordError for look-ahead beyond the model's last layer; `usual` is the default depth."""
    config = read_config(folder)
    inner = config.get("text_config")
    layers = (inner if isinstance(inner, dict) else config).get("num_hidden_layers")
    if isinstance(layers, int) and depth > max(layers - 1, usual):
        most = f"{folder.name} has {layers} layers, so that a gate can look {layers - 1} ahead"
        raise RecordError(f"invalid --look-ahead {depth}: {most}")


def weight_files(folder: Folder) -> list[Path]:
    """Return the safetensors files that hold the weights, each checked to be whole.

    Raises RecordError naming a file that is missing or cut short, or if there are only other formats.
    """
    names = [WHOLE]
    if (index := folder.path / INDEX).exists():
        try:
            names = shards_of(_json(index, folder.name), folder.name)
        except TraceError as wrong:
            raise RecordError(str(wrong)) from None
    files = [folder.path / name for name in names]
    missing = [path.name for path in files if not path.exists()]
    if missing:
        raise RecordError(_missing(folder, missing, len(files)))
    for path in files:
        _check_whole(path, folder.name)
    return files


def _missing(folder: Folder, missing: list[str], of: int) -> str:
    pickled = sorted(path.name for pattern in ("*.bin", "*.pt", "*.pth") for path in folder.path.glob(pattern))
    if of == 1 and pickled:
        why = "pickled weights can run code, so they are refused; convert them with save_pretrained()"
        return f"{folder.name} holds {pickled[0]} but no safetensors; {why}"
    which = f"{missing[0]} (and {len(missing) - 1} more of {of} files)" if len(missing) > 1 else missing[0]
    return f"{folder.name}: {which} is missing; the download is not complete, run `hf download` again"


def _check_whole(path: Path, name: str) -> None:
    size = path.stat().st_size
    expected = 8 + _header_bytes(path, name)
    with path.open("rb") as file:
        header = file.read(expected)[8:]
    try:
        tensors = [entry for key, entry in from_json(header).items() if key != "__metadata__"]
        expected += max((int(entry["data_offsets"][1]) for entry in tensors), default=0)
    except (ValueError, AttributeError, KeyError, IndexError, TypeError, OverflowError):
        raise RecordError(f"{name}: {path.name} is damaged, or not a safetensors file; download it again") from None
    if size != expected:
        raise RecordError(f"{name}: {path.name} has {size:,} bytes of {expected:,}; download it again")


def _header_bytes(path: Path, name: str) -> int:
    """Return the length of a safetensors header. Raises RecordError."""
    try:
        with path.open("rb") as file:
            return header_length(file, path.stat().st_size, f"{name}: {path.name}")
    except TraceError as wrong:
        raise RecordError(str(wrong)) from None


def fingerprint(files: list[Path], header_bytes: Callable[[Path], int] | None = None) -> str:
    """Return the sha256 of one file's bytes; for several files, the sha256 of the output of `sha256sum`.

    Above WHOLE_HASH_BYTES: `sampled-` and the sha256 of each file's name, size, header and 256 blocks spread over it.
    `header_bytes` is the offset of the weights in files other than safetensors.
    """
    if sum(path.stat().st_size for path in files) > WHOLE_HASH_BYTES:
        return "sampled-" + _sampled(files, header_bytes or (lambda path: 8 + _header_bytes(path, path.name)))
    return digest_of(sorted(files))


def _sampled(files: list[Path], header_bytes: Callable[[Path], int]) -> str:
    digest = hashlib.sha256()
    for path in sorted(files):
        size, header = path.stat().st_size, header_bytes(path)
        digest.update(f"{path.name} {size}\n".encode())
        with path.open("rb") as file:
            digest.update(file.read(header))
            for sample in range(SAMPLES):
                file.seek(header + (size - header) * sample // SAMPLES)
                digest.update(file.read(SAMPLE_BYTES))
    return digest.hexdigest()


def _json(path: Path, name: str) -> dict[str, Any]:
    try:
        document = from_json(content(path, MOST_JSON))
    except (OSError, DocumentError) as broken:
        said = broken.strerror if isinstance(broken, OSError) else broken
        raise RecordError(f"{name}: {path.name} is damaged ({said}); download it again") from None
    if not isinstance(document, dict):
        raise RecordError(f"{name}: {path.name} is damaged (not a JSON object); download it again")
    return document
