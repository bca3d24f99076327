"""A checkpoint becomes a model ready to be recorded: safetensors only, never a repository's own code.

Loading is transformers' own. What it would let pass (weights that are missing and drawn at random) is refused here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
import transformers
from transformers.utils import logging

from moereplay.tracegen.errors import RecordError
from moereplay.tracegen.folder import Folder, fingerprint, locate, one_line, read_config, weight_files
from moereplay.tracegen.plan import check_placement

#: Transformers' own configuration of each of `placement.QUANTISERS`. bitsandbytes changes linear layers only: experts
#: that transformers keeps as one 3-D tensor stay as they were, and their bytes are recorded so.
QUANTISATIONS: dict[str, Callable[[], Any]] = {
    "bnb-8bit": lambda: transformers.BitsAndBytesConfig(load_in_8bit=True),
    "bnb-4bit": lambda: transformers.BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4"),
    "fp8": lambda: transformers.FineGrainedFP8Config(),  # noqa: PLW0108 (naming the class would import it)
}

THREADS = torch.get_num_threads()
SMALL = 100e6  #: bytes of weights below which threads wait for each other longer than they compute


class Loaded(NamedTuple):
    """A model in evaluation mode, its tokenizer, and its origin for the trace header."""

    model: transformers.PreTrainedModel
    tokenizer: transformers.PreTrainedTokenizerBase
    name: str
    revision: str  #: the hub's commit; empty for a local folder
    weights_sha256: str  #: tracegen.folder.fingerprint of the safetensors files
    dtype: str  #: float32, bfloat16, ... and the quantiser, as in bfloat16+bnb-4bit


def load(
    source: str | Folder,
    *,
    device: str = "auto",
    dtype: str = "auto",
    device_map: str | None = None,
    quantise: str | None = None,
    revision: str | None = None,
    threads: int | None = None,
    progress: bool = False,
) -> Loaded:
    """Load `miniature`, a folder, a Hugging Face id, or a located `Folder`. `device` auto is the GPU, if any.

    `device_map` (accelerate's: auto, balanced, cuda:0, ...) spreads the model over devices instead. `threads` compute
    on a CPU: by default all, but one for a small model; those of the model that was loaded last hold. `progress` lets
    transformers draw its bar. Raises RecordError naming the checkpoint and the fault.
    """
    where = _device(device)
    check_placement(dtype, device_map, quantise)
    extra = _placement(where, device_map, quantise) | {"dtype": "auto" if dtype == "auto" else getattr(torch, dtype)}
    folder = source if isinstance(source, Folder) else locate(source, revision)
    _check_known(folder)
    files = weight_files(folder)
    with quiet(progress):
        tokenizer = _loaded(
            folder, "tokenizer", lambda: transformers.AutoTokenizer.from_pretrained(folder.path, **_OWN_FILES)
        )
        model = _loaded(folder, "model", lambda: _model(folder, extra))
    if "device_map" not in extra:
        model = _loaded(folder, f"model on {where}", lambda: model.to(where))
    small = sum(parameter.nbytes for parameter in model.parameters()) < SMALL
    torch.set_num_threads(threads or (1 if small else THREADS))
    called = str(model.dtype).removeprefix("torch.") + (f"+{quantise}" if quantise else "")
    return Loaded(model.eval(), tokenizer, folder.name, folder.revision, fingerprint(files), called)


_OWN_FILES: dict[str, Any] = {"trust_remote_code": False, "local_files_only": True}


def _model(folder: Folder, extra: dict[str, Any]) -> transformers.PreTrainedModel:
    both: Any = transformers.AutoModelForCausalLM.from_pretrained(
        folder.path,
        use_safetensors=True,
        output_loading_info=True,
        ignore_mismatched_sizes=True,  # not ignored, but refused below by name
        **_OWN_FILES,
        **extra,
    )
    model, found = both
    _refuse_other_weights(folder, found["missing_keys"], found["mismatched_keys"])
    model.config.name_or_path = folder.name  # messages name the model by it: no path of this machine
    return model


def _refuse_other_weights(folder: Folder, missing: set[str], mismatched: set[tuple[str, Any, Any]]) -> None:
    """Raises RecordError for weights that config.json promises and the files do not hold in that shape."""
    fix = "config.json belongs to another model, or the download is not complete"
    if mismatched:
        name, stored, expected = min(mismatched)
        wrong = f"{name} has shape {tuple(stored)}, config.json says {tuple(expected)}"
        raise RecordError(f"{folder.name}: {wrong}; {fix}")
    if missing:
        more = f" and {len(missing) - 1} more weights" if len(missing) > 1 else ""
        raise RecordError(f"{folder.name} lacks {min(missing)}{more}; {fix}")


def _check_known(folder: Folder) -> None:
    """Raises RecordError unless transformers itself has a causal language model for the config."""
    config = read_config(folder)
    kind = config["model_type"]
    if kind not in transformers.CONFIG_MAPPING:
        why = "; the repository's own code is never run" if "auto_map" in config else ""
        raise RecordError(f"{folder.name}: unknown model_type {kind!r}{why}; upgrade transformers")
    loaded = _loaded(folder, "config.json", lambda: transformers.AutoConfig.from_pretrained(folder.path, **_OWN_FILES))
    if type(loaded) not in transformers.MODEL_FOR_CAUSAL_LM_MAPPING:
        raise RecordError(
            f"{folder.name} ({kind}) is not a causal language model: expected a model that predicts the next token"
        )


def _placement(device: torch.device, device_map: str | None, quantise: str | None) -> dict[str, Any]:
    """Return from_pretrained's arguments for the placement and dtype of weights."""
    chosen: dict[str, Any] = {}
    if quantise is not None:
        chosen = {"quantization_config": QUANTISATIONS[quantise](), "device_map": device_map or {"": device}}
    elif device_map is not None:
        chosen = {"device_map": device_map}
    return chosen


def _device(device: str) -> torch.device:
    if device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        named = torch.device(device)
        torch.empty(0, device=named)
    except (RuntimeError, AssertionError):
        raise RecordError(f"invalid --device {device!r}: torch does not find this device; use auto or cpu") from None
    return named


def _loaded(folder: Folder, what: str, load_it: Callable[[], Any]) -> Any:
    """Call `load_it` and turn errors of other libraries into one line that names the checkpoint."""
    try:
        return load_it()
    except RecordError:
        raise
    except (torch.cuda.OutOfMemoryError, MemoryError):
        fix = "use --device-map auto, a smaller --dtype, or --quantise"
        raise RecordError(f"{folder.name} does not fit into memory; {fix}") from None
    except Exception as refused:  # foreign data in foreign code: it can be anything
        raise RecordError(f"{folder.name}: {what} cannot be loaded: {one_line(refused)}") from refused


@contextmanager
def quiet(progress: bool) -> Iterator[None]:
    """Suppress remarks of transformers, and its progress bar unless wanted; restore both settings."""
    level, bar = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    (logging.enable_progress_bar if progress else logging.disable_progress_bar)()
    try:
        yield
    finally:
        logging.set_verbosity(level)
        (logging.enable_progress_bar if bar else logging.disable_progress_bar)()
