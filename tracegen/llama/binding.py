"""llama.cpp's library by ctypes: everything that depends on its binary interface is here, and checked before use.

No header of a build is copied. Structures of parameters are whatever the library's own `llama_*_default_params` return,
in a buffer larger than any of them; the few fields that are set are found between known default values. The head of
`ggml_tensor` is checked on a tensor that the library makes. What does not fit is refused before a model is loaded.
"""

from __future__ import annotations

import ctypes as c
import re
import struct
import time
from collections import deque
from collections.abc import Callable, Collection
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from moereplay.tracegen.errors import RecordError

#: Packages that hold a library, and where in them.
PACKAGES = {
    "xllamacpp": ("xllamacpp*.so", "xllamacpp*.pyd"),
    "llama_cpp_py_sync": ("libllama.so", "libllama.dylib"),
    "llama_cpp": ("lib/libllama.so", "lib/libllama.dylib"),
}
LIBRARIES = ("libllama.so*", "libllama.v*.so", "libllama.dylib")
AT_ONCE = 512  #: tokens of one decode: more than one part of a batch would be reordered
ROOM = 2048  #: bytes, several times the parameters of any build, which pass by the stack or by reference
ERROR = 4  #: ggml's level of a line of its log
F32, I32 = 0, 26  #: ggml's types of the tensors that are read
DTYPES = {F32: np.dtype("<f4"), I32: np.dtype("<i4")}
FIT = "install the package of the extra, or pass a build of 2026 with --llama-lib"


class Parameters(c.Structure):
    """Parameters of a model or of a context, as the library lays them out."""

    _fields_ = [("raw", c.c_ubyte * ROOM)]


class TensorHead(c.Structure):
    """Beginning of ggml_tensor."""

    _fields_ = [("type", c.c_int32), ("buffer", c.c_void_p), ("ne", c.c_int64 * 4), ("nb", c.c_size_t * 4)]


class Space(c.Structure):
    """ggml_init_params."""

    _fields_ = [("size", c.c_size_t), ("memory", c.c_void_p), ("no_alloc", c.c_bool)]


class Batch(c.Structure):
    """llama_batch."""

    _fields_ = [
        ("n_tokens", c.c_int32),
        ("token", c.POINTER(c.c_int32)),
        ("embd", c.c_void_p),
        ("pos", c.POINTER(c.c_int32)),
        ("n_seq_id", c.POINTER(c.c_int32)),
        ("seq_id", c.POINTER(c.POINTER(c.c_int32))),
        ("logits", c.POINTER(c.c_int8)),
    ]


class Message(c.Structure):
    """llama_chat_message."""

    _fields_ = [("role", c.c_char_p), ("content", c.c_char_p)]


ON_NODE = c.CFUNCTYPE(c.c_bool, c.c_void_p, c.c_bool, c.c_void_p)
ON_LOG = c.CFUNCTYPE(None, c.c_int, c.c_char_p, c.c_void_p)
_P, _S, _I, _Q, _Z, _B = c.c_void_p, c.c_char_p, c.c_int32, c.c_int64, c.c_size_t, c.c_bool
#: Functions that are called: result, then arguments.
FUNCTIONS: dict[str, tuple[Any, ...]] = {
    "llama_backend_init": (None,),
    "llama_log_set": (None, ON_LOG, _P),
    "llama_print_system_info": (_S,),
    "llama_model_default_params": (Parameters,),
    "llama_context_default_params": (Parameters,),
    "llama_model_load_from_file": (_P, _S, Parameters),
    "llama_model_get_vocab": (_P, _P),
    "llama_model_n_ctx_train": (_I, _P),
    "llama_model_chat_template": (_S, _P, _S),
    "llama_chat_apply_template": (_I, _S, c.POINTER(Message), _Z, _B, c.POINTER(c.c_char), _I),
    "llama_vocab_n_tokens": (_I, _P),
    "llama_vocab_bos": (_I, _P),
    "llama_vocab_get_add_bos": (_B, _P),
    "llama_vocab_is_eog": (_B, _P, _I),
    "llama_tokenize": (_I, _P, _S, _I, c.POINTER(_I), _I, _B, _B),
    "llama_init_from_model": (_P, _P, Parameters),
    "llama_set_n_threads": (None, _P, _I, _I),
    "llama_get_memory": (_P, _P),
    "llama_memory_clear": (None, _P, _B),
    "llama_batch_init": (Batch, _I, _I, _I),
    "llama_decode": (_I, _P, Batch),
    "llama_get_logits_ith": (c.POINTER(c.c_float), _P, _I),
    "ggml_backend_load_all": (None,),
    "ggml_backend_load_all_from_path": (None, _S),
    "ggml_backend_dev_count": (_Z,),
    "ggml_init": (_P, Space),
    "ggml_new_tensor_3d": (_P, _P, _I, _Q, _Q, _Q),
    "ggml_get_name": (_P, _P),
    "ggml_nbytes": (_Z, _P),
    "ggml_backend_tensor_get": (None, _P, _P, _Z, _Z),
}
#: Functions of newer builds, whose results identify the build.
NAMES = ("llama_version", "ggml_version", "ggml_commit")


def library_file(given: Path | None = None) -> Path:
    """Return the file of the user's library, or of the first package that has one. Raises RecordError."""
    if given is not None:
        found = sorted(each for pattern in LIBRARIES for each in given.glob(pattern)) if given.is_dir() else [given]
        if not found or not found[0].is_file():
            raise RecordError(
                f"--llama-lib {given}: no such file: expected libllama.so, or the folder that contains it"
            )
        return found[0].absolute()
    for package, patterns in PACKAGES.items():
        spec = find_spec(package)
        places = [Path(place) for place in (spec and spec.submodule_search_locations) or ()]
        for found in (each for place in places for pattern in patterns for each in sorted(place.glob(pattern))):
            return found.absolute()
    from moereplay.traces.files import install_command

    raise RecordError(f"a GGUF file needs llama.cpp: {install_command('record-gguf')}, or pass --llama-lib libllama.so")


class Places(NamedTuple):
    """Bytes of the fields that are set, in a build's parameters."""

    repack: int  #: of the model: whether experts may be copied into another layout
    callback: int  #: of the context: called for every node
    types: int  #: of keys and values
    flash: int  #: flash attention


#: use_extra_bufts in llama_model_params: its byte, and the flags around it as they are by default, from a byte on.
REPACKS = ((74, 72, b"\0\0\1\0\0"), (69, 64, b"\0\1\0\0\0\1\0\0"))
GPU_LAYERS = 16  #: byte of n_gpu_layers in llama_model_params, after two pointers
LAYER_COUNTS = (-1, 0, 999)  #: its defaults: all
SIZES = (512, 2048, 512, 1)  #: n_ctx, n_batch, n_ubatch, n_seq_max, the first of llama_context_params
#: No callback and no callback data, and keys and values of 16 bits; before them a disabled threshold, and in some
#: builds four unset bytes between.
CALLBACK, OFF = struct.pack("<QQii", 0, 0, 1, 1), struct.pack("<f", -1.0)
TO_TYPES = 16  #: from the callback
TO_FLASH = -32  #: from the threshold
AUTO = -1  #: default of flash attention


class Library:
    """llama.cpp's library with its functions declared and its structures checked. Raises RecordError."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.said: deque[tuple[int, str]] = deque(maxlen=5000)  #: levels and text of the library's last lines
        self._parts = self._opened()
        self.declare(FUNCTIONS)
        self.build = {name: _text_of(part, name) for part in self._parts for name in NAMES if hasattr(part, name)}
        self._on_log = ON_LOG(lambda level, line, _: self.said.append((level, _text(line))))
        self.llama_log_set(self._on_log, None)
        self.places = self._places()
        self.name_at = self._name_at()
        self.ggml_backend_load_all_from_path(str(path.parent).encode())  # variants for processors, next to the library
        if not self.ggml_backend_dev_count():
            self.ggml_backend_load_all()  # where a distribution keeps them
        self.llama_backend_init()

    def __getattr__(self, name: str) -> Callable[..., Any]:
        raise AttributeError(name)  # functions are set by declare

    def _opened(self) -> list[c.CDLL]:
        try:
            parts = [c.CDLL(str(self.path), mode=c.RTLD_GLOBAL)]
            beside = sorted(each for each in self.path.parent.glob("libggml*") if "-cpu" not in each.name)
            return parts + [c.CDLL(str(each)) for each in beside]
        except OSError as refused:  # built for another processor or a newer system
            raise RecordError(f"{self.path}: cannot be loaded ({refused}); {FIT}") from None

    def declare(self, functions: dict[str, tuple[Any, ...]]) -> None:
        """Make functions attributes: each with its result and its arguments. Raises RecordError for a missing one."""
        for name, (result, *arguments) in functions.items():
            function = next((getattr(part, name) for part in self._parts if hasattr(part, name)), None)
            if function is None:
                raise RecordError(f"{self.path}: missing function {name}: expected llama.cpp's library: {FIT}")
            function.restype, function.argtypes = result, arguments
            setattr(self, name, function)

    def _places(self) -> Places:
        model = bytes(self.llama_model_default_params().raw)
        fits = [at for at, start, flags in REPACKS if model[start : start + len(flags)] == flags]
        layers = struct.unpack_from("<i", model, GPU_LAYERS)[0]
        if any(model[:GPU_LAYERS]) or layers not in LAYER_COUNTS or len(fits) != 1:
            raise RecordError(f"{self.path}: llama_model_params have unknown defaults; {FIT}")
        context = bytes(self.llama_context_default_params().raw)
        spots = [at for at in range(40, 256, 8) if context[at : at + len(CALLBACK)] == CALLBACK]
        found = [(at, off) for at in spots for off in (at - 4, at - 8) if context[off : off + 4] == OFF]
        if struct.unpack_from("<4I", context) != SIZES or len(found) != 1:
            raise RecordError(f"{self.path}: llama_context_params have unknown defaults; {FIT}")
        ((callback, threshold),) = found
        if struct.unpack_from("<i", context, threshold + TO_FLASH)[0] != AUTO:
            raise RecordError(f"{self.path}: the position of flash_attn differs from known builds; {FIT}")
        return Places(fits[0], callback, callback + TO_TYPES, threshold + TO_FLASH)

    def _name_at(self) -> int:
        """Return the byte of a tensor's name; the head of a tensor must be as declared."""
        tensor = self.ggml_new_tensor_3d(self.ggml_init(Space(1 << 16, None, True)), I32, 3, 5, 7)
        head = TensorHead.from_address(tensor)
        found = [head.type, *head.ne, *head.nb, self.ggml_nbytes(tensor)]
        if found != [I32, 3, 5, 7, 1, 4, 12, 60, 420, 420]:
            raise RecordError(f"{self.path}: the layout of ggml_tensor differs from known builds; {FIT}")
        return self.ggml_get_name(tensor) - tensor

    @property
    def last_words(self) -> str:
        """The library's last message, in one line: its errors, without what it says besides, if there are any."""
        last = list(self.said)[-20:]
        errors = [line for level, line in last if level == ERROR]
        return " ".join(errors[-2:] or [line for _, line in last[-3:] if line])[-300:]

    def name(self, tensor: int) -> bytes:
        """Return the name of a node."""
        return c.string_at(tensor + self.name_at)

    def values(self, tensor: int) -> np.ndarray:
        """Copy a tensor of float32 or int32, slowest axis first; a view keeps its strides. Raises RecordError."""
        head = TensorHead.from_address(tensor)
        if head.type not in DTYPES:
            raise RecordError(f"node {self.name(tensor)!r} has ggml type {head.type}: expected float32 or int32")
        raw = np.empty(self.ggml_nbytes(tensor), np.uint8)
        self.ggml_backend_tensor_get(tensor, raw.ctypes.data, 0, raw.nbytes)
        return np.ndarray(tuple(head.ne)[::-1], DTYPES[head.type], raw, 0, tuple(head.nb)[::-1]).copy()


def _text_of(part: c.CDLL, name: str) -> str:
    function = getattr(part, name)
    function.restype, function.argtypes = _S, []
    return _text(function())


def _text(line: bytes | None) -> str:
    return (line or b"").decode(errors="replace").strip()


class Model:
    """A loaded file: its vocabulary, and after `make_context` its passes. Raises RecordError."""

    def __init__(self, library: Library, path: Path) -> None:
        self._library = library
        params = library.llama_model_default_params()
        params.raw[library.places.repack] = 0  # experts stay in the mapped file: a copy in memory may not fit
        self._place(params)
        self._model = library.llama_model_load_from_file(str(path).encode(), params)
        if not self._model:
            raise RecordError(f"llama.cpp cannot load {path.name}: {library.last_words}")
        self._vocabulary = library.llama_model_get_vocab(self._model)
        self.vocabulary: int = library.llama_vocab_n_tokens(self._vocabulary)
        self.longest: int = library.llama_model_n_ctx_train(self._model)
        adds = library.llama_vocab_get_add_bos(self._vocabulary)
        self.opening: int | None = library.llama_vocab_bos(self._vocabulary) if adds else None
        self.template: bytes | None = library.llama_model_chat_template(self._model, None)

    def _place(self, params: Parameters) -> None:
        struct.pack_into("<i", params.raw, GPU_LAYERS, 0)

    def tokens(self, text: str, special: bool) -> list[int]:
        """Return the ids of a text; with `special` the model's opening token comes before it."""
        raw = text.encode()
        space = (c.c_int32 * (len(raw) + 16))()
        count = self._library.llama_tokenize(self._vocabulary, raw, len(raw), space, len(space), special, True)
        if count < 0:
            raise RecordError(f"llama.cpp cannot tokenise a text of {len(raw):,} bytes: {self._library.last_words}")
        return space[:count]

    def chat(self, text: str) -> str:
        """Return a user's message in the model's template, up to where the answer begins."""
        message = Message(b"user", text.encode())
        space = c.create_string_buffer(len(text.encode()) * 2 + (1 << 16))
        size = self._library.llama_chat_apply_template(self.template, c.byref(message), 1, True, space, len(space))
        if not 0 < size < len(space):
            raise RecordError("llama.cpp does not support the file's chat template; omit --chat")
        return space.raw[:size].decode(errors="replace")

    def ends(self, token: int) -> bool:
        """Return whether the model ends a text by the token."""
        return bool(self._library.llama_vocab_is_eog(self._vocabulary, token))

    def make_context(self, longest: int, threads: int, exact: bool, on_node: Callable[[int, bool], bool]) -> None:
        """Create a context for `longest` tokens; `on_node` receives each node and whether it is yet to be computed.

        `exact` keeps keys and values in float32, without flash attention.
        """
        library, places = self._library, self._library.places
        params = library.llama_context_default_params()
        struct.pack_into("<3I", params.raw, 0, longest, AT_ONCE, AT_ONCE)
        self._on_node = ON_NODE(lambda tensor, ask, _: on_node(tensor, ask))
        address = c.cast(self._on_node, c.c_void_p).value
        struct.pack_into("<Q", params.raw, places.callback, address)
        if exact:
            struct.pack_into("<ii", params.raw, places.types, F32, F32)
            struct.pack_into("<i", params.raw, places.flash, 0)
        self._start(params, longest, threads)

    def _start(self, params: Parameters, longest: int, threads: int) -> None:
        library = self._library
        self._context = library.llama_init_from_model(self._model, params)
        if not self._context:
            raise RecordError(f"llama.cpp cannot create a context of {longest:,} tokens: {library.last_words}")
        library.llama_set_n_threads(self._context, threads, threads)
        self._batch = library.llama_batch_init(AT_ONCE, 0, 1)

    def forget(self) -> None:
        """Begin a new sequence."""
        self._library.llama_memory_clear(self._library.llama_get_memory(self._context), True)

    def decode(self, ids: list[int], start: int) -> np.ndarray:
        """Run at most AT_ONCE tokens from position `start` on; return their logits (T, V)."""
        self._step(ids, start, range(len(ids)))  # of each: else the last layer is computed for one token alone
        rows = [self._library.llama_get_logits_ith(self._context, at) for at in range(len(ids))]
        return np.stack([np.ctypeslib.as_array(row, (self.vocabulary,)) for row in rows])

    def _step(self, ids: list[int], start: int, asked: Collection[int]) -> None:
        """Run tokens from position `start` on; `asked` are those whose logits are wanted."""
        batch = self._batch
        batch.n_tokens = len(ids)
        for at, token in enumerate(ids):
            batch.token[at], batch.pos[at], batch.n_seq_id[at], batch.seq_id[at][0] = token, start + at, 1, 0
            batch.logits[at] = at in asked
        if code := self._library.llama_decode(self._context, batch):
            raise RecordError(f"llama.cpp cannot decode {len(ids)} tokens ({code}): {self._library.last_words}")


# -- llama.cpp's own expert cache: run a trace's tokens through it, and keep what it prints and how long tokens take.
# -- The cache wants a device of its own. Without a GPU a server of llama.cpp's RPC backend on this machine is one: it
# -- computes on the CPU, and experts that the cache misses are sent to it.


ADD_SERVER, START_SERVER = b"ggml_backend_rpc_add_server", b"ggml_backend_rpc_start_server"
#: Functions beyond those of a recording.
CACHE_FUNCTIONS: dict[str, tuple[Any, ...]] = {
    "llama_free": (None, _P),
    "llama_synchronize": (None, _P),
    "ggml_backend_reg_by_name": (_P, _S),
    "ggml_backend_reg_get_proc_address": (_P, _P, _S),
    "ggml_backend_register": (None, _P),
    "ggml_backend_dev_by_type": (_P, c.c_int),
    "ggml_backend_dev_name": (_S, _P),
    "ggml_backend_cpu_buffer_type": (_P,),
}
CPU, GPU, INTEGRATED = 0, 1, 2  #: ggml's types of devices
EVERY_LAYER = 999
OVERRIDES = 8  #: byte of tensor_buft_overrides in llama_model_params, behind the devices
EXPERTS = rb"\.ffn_(up|down|gate|gate_up)_(ch|)exps"  #: tensors that --cpu-moe leaves in main memory
#: From cb_eval on: it and its data, two types, moe_cache_size, two pointers, then flags that are off, on, on, on.
CACHE_SIZE, FLAGS = 24, (48, b"\0\1\1\1")
SIZED = "MoE cache size"
ABOUT = re.compile(r"MoE cache|llama_moe_cache|\d slots \(")  #: lines about the cache


class Override(c.Structure):
    """llama_model_tensor_buft_override."""

    _fields_ = [("pattern", c.c_char_p), ("buffer_type", c.c_void_p)]


class Cached:
    """A library whose expert cache can be run. Raises RecordError if the build has none."""

    def __init__(self, library: Library) -> None:
        self._library = library
        library.declare(CACHE_FUNCTIONS)
        context = bytes(library.llama_context_default_params().raw)
        flags = library.places.callback + FLAGS[0]
        if context[flags : flags + len(FLAGS[1])] != FLAGS[1]:
            raise RecordError(f"{library.path}: this build has no expert cache, which llama.cpp has since October 2026")
        self.device = self._device()

    def _device(self) -> str:
        for kind in (GPU, INTEGRATED):
            if found := self._library.ggml_backend_dev_by_type(kind):
                return self._library.ggml_backend_dev_name(found).decode(errors="replace")
        return ""

    def _of_rpc(self, name: bytes, result: Any, *arguments: Any) -> Any:
        backend = self._library.ggml_backend_reg_by_name(b"RPC")
        address = backend and self._library.ggml_backend_reg_get_proc_address(backend, name)
        if not address:
            no = "no GPU was found, and this build has no RPC backend to take its place"
            raise RecordError(f"{self._library.path}: {no}; expected a build with RPC (Debian's, llama-cpp-py-sync's)")
        return c.CFUNCTYPE(result, *arguments)(address)

    def serve(self, endpoint: str, threads: int) -> None:
        """Be a device for another process, on the CPU, until this process is ended."""
        start = self._of_rpc(START_SERVER, None, _S, _S, _Z, _Z, c.POINTER(_P))
        devices = (_P * 1)(self._library.ggml_backend_dev_by_type(CPU))
        start(endpoint.encode(), None, threads, 1, devices)

    def connect(self, endpoint: str) -> None:
        """Take the server as a device."""
        if not (backend := self._of_rpc(ADD_SERVER, _P, _S)(endpoint.encode())):
            raise RecordError(f"llama.cpp's RPC server at {endpoint} has no device: {self._library.last_words}")
        self._library.ggml_backend_register(backend)
        self.device = self._device()

    def load(self, path: Path) -> CachedModel:
        """Load the file: everything on the device but the experts, which stay as the file has them."""
        library = self._library
        overrides = (Override * 2)(Override(EXPERTS, library.ggml_backend_cpu_buffer_type()), Override(None, None))
        return CachedModel(library, path, overrides)


class CachedModel(Model):
    """A loaded file whose experts are in main memory."""

    def __init__(self, library: Library, path: Path, overrides: Any) -> None:
        self._overrides = overrides  # the library keeps no copy
        super().__init__(library, path)

    def _place(self, params: Any) -> None:
        struct.pack_into("<Q", params.raw, OVERRIDES, c.addressof(self._overrides))
        struct.pack_into("<i", params.raw, GPU_LAYERS, EVERY_LAYER)

    def run(self, requests: list[list[Any]], size: int, longest: int, threads: int) -> dict[str, Any]:
        """Run each request, [tokens, how many of them are the prompt], with a cache of `size` bytes, empty at first.

        Return what llama.cpp printed of its cache, and the mean milliseconds of a token behind a prompt.
        """
        library = self._library
        params = library.llama_context_default_params()
        struct.pack_into("<3I", params.raw, 0, longest, AT_ONCE, AT_ONCE)
        struct.pack_into("<Q", params.raw, library.places.callback + CACHE_SIZE, size)
        library.said.clear()
        self._start(params, longest, threads)
        wall = sum(self._request(*request) for request in requests)
        library.llama_free(self._context)  # prints the counts
        tokens = sum(len(ids) - prompt for ids, prompt in requests)
        said = [line for _, line in library.said if ABOUT.search(line)]
        if not any(SIZED in line for line in said):
            raise RecordError(f"llama.cpp made no expert cache of {size:,} bytes: {' '.join(said)[-300:]}")
        return {"said": said, "ms": 1000 * wall / tokens if tokens else None}

    def _request(self, ids: list[int], prompt: int) -> float:
        """Run a prompt at once and what follows token by token; return the seconds of the latter.

        Only the last token of a prompt is asked for, as users of llama.cpp do: its last layer runs for that one alone.
        """
        self.forget()
        for at in range(0, prompt, AT_ONCE):
            part = ids[at : min(at + AT_ONCE, prompt)]
            self._step(part, at, (prompt - at - 1,))
        self._library.llama_synchronize(self._context)
        began = time.perf_counter()
        for at in range(prompt, len(ids)):
            self._step(ids[at : at + 1], at, (0,))
            self._library.llama_synchronize(self._context)
        return time.perf_counter() - began
