"""Find a model's sizes by a known name, a folder, a file, a URL, or a repository on the hub."""

from __future__ import annotations

import io
import re
import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO, cast

from moereplay.traces.checkpoints.config import numbers_of
from moereplay.traces.checkpoints.gguf import Gguf, is_gguf, read_gguf, read_header
from moereplay.traces.checkpoints.quants import quantised
from moereplay.traces.checkpoints.tensors import Stored, known_of, model_of_gguf, sizes_of, tensors_of, with_sizes
from moereplay.traces.dense import dense_of
from moereplay.traces.documents import DocumentError, content, from_json, json_text
from moereplay.traces.geometry import KnownModel, by_spelling, known
from moereplay.traces.network import (
    IDENTITY,
    MissingError,
    Network,
    Ranged,
    begun,
    endpoint,
    is_offline,
)
from moereplay.traces.schema import TraceError, shown
from moereplay.traces.texts import size

CONFIG, INDEX, WEIGHTS = "config.json", "model.safetensors.index.json", "model.safetensors"
SPLIT = re.compile(r"-(\d{5})-of-(\d{5})\.gguf$")
MOST_HEADER = 100 << 20  #: bytes of a safetensors header, the format's own limit
MOST_FILES = 2_000
CONTEXT = 4_096  #: positions of the KV cache in `explained`


def model_of(spec: str, quant: str = "", refresh: bool = False) -> KnownModel:
    """Return the model of a known name, a folder, `config.json`, a GGUF file, its URL, or `owner/name` of the hub.

    Sizes come from the headers of the weights if available, else from `config.json`; with `quant` they are
    estimated for that quantisation. With `refresh` answers that were kept are read again. Raises TraceError.
    """
    found = _model_of(spec, refresh)
    return quantised(found, quant) if quant else found


def _model_of(spec: str, refresh: bool) -> KnownModel:
    if spec.lower() in by_spelling():
        return known(spec)
    if spec.startswith(("http://", "https://")):
        return _over_network(partial(_of_address, spec), refresh)
    path = Path(spec)
    if path.is_dir():
        return _of_folder(path)
    if path.is_file():
        return _of_file(path)
    if IDENTITY.fullmatch(spec) and not spec.startswith("."):
        return _over_network(partial(_of_hub, spec), refresh)
    if "/" in spec or path.suffix in (".json", ".gguf", ".safetensors"):
        raise TraceError(
            f"{shown(spec)}: no such file or folder; pass a model's file, a known name, or owner/name of the hub"
        )
    return known(spec)


def _of_file(path: Path) -> KnownModel:
    if path.suffix == ".json":
        return known_of(numbers_of(_document(path), path.name, str(path)), path.resolve().parent.name or path.stem)
    if is_gguf(path):
        return model_of_gguf([read_gguf(part) for part in parts_of(path)], path.stem, str(path))
    if path.suffix == ".safetensors":
        return _of_folder(path.parent)
    found = "" if path.stat().st_size else "the file is empty: "
    raise TraceError(f"{path}: {found}expected a config.json, a GGUF file, or a folder of a checkpoint")


def parts_of(path: Path) -> list[Path]:
    """Return the files that a GGUF was split into. Raises TraceError if one is missing."""
    found = SPLIT.search(path.name)
    if not found:
        return [path]
    parts = [path.with_name(part) for part in _split_names(path.name)]
    if missing := [part.name for part in parts if not part.is_file()]:
        raise TraceError(f"{path}: missing {missing[0]}, one of its {int(found[2])} parts")
    return parts


def _split_names(name: str) -> list[str]:
    found = SPLIT.search(name)
    assert found
    count = int(found[2])
    if not 0 < count <= MOST_FILES:
        raise TraceError(f"{name}: {count:,} parts: expected 1 to {MOST_FILES:,}")
    return [f"{name[: found.start()]}-{at:05d}-of-{found[2]}.gguf" for at in range(1, count + 1)]


def _of_folder(folder: Path) -> KnownModel:
    ggufs = sorted(folder.glob("*.gguf"))
    if not (folder / CONFIG).is_file():
        if len({SPLIT.sub("", file.name) for file in ggufs}) == 1:
            return _of_file(ggufs[0])
        several = f"{len(ggufs)} GGUF files; pass one of them" if ggufs else "neither a config.json nor a GGUF file"
        raise TraceError(f"{folder}: the folder has {several}")
    numbers = numbers_of(_document(folder / CONFIG), str(folder), str(folder))
    model = known_of(numbers, folder.resolve().name)
    if (folder / INDEX).is_file():
        names = shards_of(_document(folder / INDEX), str(folder))
    else:
        names = sorted(file.name for file in folder.glob("*.safetensors"))
    files = [folder / name for name in names]
    if not files or any(not file.is_file() for file in files):
        return model
    tensors: dict[str, Stored] = {}
    for file in files:
        with file.open("rb") as stream:
            end = file.stat().st_size
            tensors |= tensors_of(_safetensors(stream, end, str(file)), str(file), end)
    return with_sizes(model, sizes_of(tensors, str(folder), numbers.layers + numbers.dense_layers), str(folder))


def shards_of(index: Mapping[str, Any], name: str) -> list[str]:
    """Return the file names listed in an index of weights. Raises TraceError unless all are plain names."""
    listed = index.get("weight_map")
    files = sorted({str(file) for file in listed.values()}) if isinstance(listed, Mapping) else []
    if not 0 < len(files) <= MOST_FILES or any(Path(file).name != file or file.startswith(".") for file in files):
        raise TraceError(f"{name}: {INDEX} does not say which file holds which weight; download it again")
    return files


def _document(path: Path) -> Mapping[str, Any]:
    try:
        return _table(content(path), str(path))
    except OSError as wrong:
        raise TraceError(f"{path}: {wrong.strerror}") from None


def _table(text: bytes, name: str) -> Mapping[str, Any]:
    try:
        found = from_json(text)
    except (DocumentError, ValueError) as wrong:
        raise TraceError(f"{name}: {wrong}") from None
    if not isinstance(found, dict):
        raise TraceError(f"{name}: invalid content {shown(found)}: expected a JSON object")
    return found


def _safetensors(stream: BinaryIO, size: int, name: str) -> Mapping[str, Any]:
    """Read the header of a safetensors file. Raises TraceError for a truncated or different file."""
    return _table(stream.read(header_length(stream, size, name)), name)


def header_length(stream: BinaryIO, size: int, name: str) -> int:
    """Return the length of a safetensors header, which the file's first 8 bytes give. Raises TraceError."""
    start = stream.read(8)
    length = struct.unpack("<Q", start)[0] if len(start) == 8 else 0
    if not 2 <= length <= min(MOST_HEADER, size - 8):
        raise TraceError(f"{name}: not a safetensors file, or truncated; download it again")
    return length


# -- the hub and other addresses

AT_ONCE = 8  #: headers of weight files that are fetched at the same time


def _over_network(read: Callable[[Network], KnownModel], refresh: bool) -> KnownModel:
    """Read a model from what is kept, else over the network. What is kept and makes no model is read again."""
    network = Network(kept=not refresh)
    try:
        model = read(network)
    except TraceError:
        if not network.used_kept or is_offline():
            raise
        network = Network(kept=False)
        model = read(network)
    network.keep()
    return model


def _of_hub(identity: str, network: Network) -> KnownModel:
    """Read a model of the hub: config.json and the headers of its weights, or of its one GGUF file."""
    base = f"{endpoint()}/{identity}/resolve/main/"
    try:
        config = _table(network.document(base + CONFIG), f"{identity}/{CONFIG}")
    except TraceError as wrong:
        hint = f"for a repository of GGUF files pass the address of one file: {base}FILE.gguf"
        raise TraceError(f"no folder {identity} here, and of the hub: {wrong}; {hint}") from None
    source = f"config.json of {identity}"
    numbers = numbers_of(config, identity, source)
    model = known_of(numbers, identity.rpartition("/")[2].lower())
    try:
        names = shards_of(_table(network.document(base + INDEX), f"{identity}/{INDEX}"), identity)
    except MissingError:
        names = [WEIGHTS]
    read = [begun(partial(_remote_tensors, network, base, names[at::AT_ONCE])) for at in range(AT_ONCE)]
    try:
        tensors = {tensor: stored for header in read for tensor, stored in header.result().items()}
    except MissingError:
        return model  # a repository of other files than safetensors
    sizes = sizes_of(tensors, identity, numbers.layers + numbers.dense_layers)
    return with_sizes(model.model_copy(update={"source": f"{source} and headers of its weights"}), sizes, identity)


def _remote_tensors(network: Network, base: str, names: Sequence[str]) -> dict[str, Stored]:
    """Return the tensors in the headers of some weight files."""
    found: dict[str, Stored] = {}
    for address in (base + name for name in names):
        header = network.once(f"{address}#header", partial(_remote_header, network, address))
        found |= tensors_of(_table(header, address), address)
    return found


def _remote_header(network: Network, address: str) -> bytes:
    stream = Ranged(network, address)
    header = _safetensors(cast("BinaryIO", stream), stream.size, address)
    tensors_of(header, address, stream.size)  # a kept header no longer knows the file's end
    return json_text(header).encode()


def _of_address(address: str, network: Network) -> KnownModel:
    """Read a `config.json` or the beginning of GGUF files at an address."""
    plain = address.partition("?")[0].replace("/blob/", "/resolve/")
    if plain.endswith(".json"):
        return known_of(numbers_of(_table(network.document(plain), plain), plain, plain), plain.rsplit("/", 2)[-2])
    if not plain.endswith(".gguf"):
        raise TraceError(f"invalid address {shown(address)}: expected that of a config.json or of a GGUF file")
    folder, _, file = plain.rpartition("/")
    names = _split_names(file) if SPLIT.search(file) else [file]
    parts = [_remote_gguf(network, f"{folder}/{name}") for name in names]
    return model_of_gguf(parts, file.removesuffix(".gguf"), plain)


def _remote_gguf(network: Network, address: str) -> Gguf:
    path = Path(address.rpartition("/")[2])

    def beginning() -> bytes:
        stream = Ranged(network, address)
        return stream.beginning(read_header(cast("BinaryIO", stream), path, stream.size).start)

    data = network.once(f"{address}#gguf", beginning)
    return read_header(io.BytesIO(data), path, len(data))


# -- A model's sizes in words, for `moereplay models NAME`


def explained(model: KnownModel) -> list[tuple[str, str]]:
    """Return (heading, text) pairs: shape, bytes of experts and dense weights, KV cache, and sources."""
    return [pair for pair in _pairs(model) if pair[1]]


def _pairs(model: KnownModel) -> Iterator[tuple[str, str]]:
    geometry = model.geometry
    dense = dense_of(geometry)
    experts = geometry.total_bytes
    active = geometry.k * sum(geometry.mean_bytes) + dense.read
    stored = model.published.format
    first = f", after {model.dense_layers} without experts" if model.dense_layers else ""
    shared = f", and {geometry.shared_experts} shared" if geometry.shared_experts else ""
    yield "model", model.name
    yield "other names", ", ".join(model.aliases)
    yield "MoE layers", f"{geometry.layers}{first}"
    yield "experts", f"{geometry.experts} in a layer, {geometry.k} per token{shared}"
    yield "weights", model.weights if model.params else ""
    yield "an expert", f"{_expert_size(geometry.rows.sizes)}, {geometry.mean_bits:.4g} bits per weight ({stored})"
    yield "all experts", size(experts)
    yield (
        "dense weights",
        f"{size(dense.resident)} in memory, {size(dense.read)} read per token" if dense.read else "unknown",
    )
    yield "a token reads", f"{size(active)}: {active / (experts + dense.resident):.1%} of all"
    yield "KV cache", _kv_words(model)
    yield "context", f"{model.context:,} positions" if model.context else ""
    yield "layers of MTP", f"{model.mtp}, which no size here counts" if model.mtp else ""
    yield "router", geometry.router.family
    yield "source", model.source
    yield "note", model.note
    yield "assumed", model.assumed


def _expert_size(sizes: tuple[int, ...]) -> str:
    least, most = min(sizes), max(sizes)
    return f"{least / 2**20:.4g} MiB" if least == most else f"{least / 2**20:.4g} to {most / 2**20:.4g} MiB"


def _kv_words(model: KnownModel) -> str:
    if not model.kv_bytes:
        return ""
    growing = size(model.kv_bytes - sum(kv_window.kv_bytes for kv_window in model.kv_windows))
    windows = "".join(f" and {size(each.kv_bytes)} up to {each.positions:,}" for each in model.kv_windows)
    held = size(model.kv_held(CONTEXT))
    return f"{growing} per position{windows}, at {model.kv_bits} bits; {held} at {CONTEXT:,} positions"
