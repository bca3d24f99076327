"""llama.cpp's own expert cache: run a trace's tokens through it, and keep what it prints and how long tokens take.

The cache wants a device of its own. Without a GPU a server of llama.cpp's RPC backend on this machine is one: it
computes on the CPU, and experts that the cache misses are sent to it.
"""

from __future__ import annotations

import ctypes as c
import re
import struct
import time
from pathlib import Path
from typing import Any

from moereplay.tracegen.errors import RecordError
from moereplay.tracegen.llama.binding import AT_ONCE, GPU_LAYERS, Library, Model

_P, _S, _I, _Z, _B = c.c_void_p, c.c_char_p, c.c_int32, c.c_size_t, c.c_bool
ADD_SERVER, START_SERVER = b"ggml_backend_rpc_add_server", b"ggml_backend_rpc_start_server"
#: Functions beyond those of a recording.
FUNCTIONS: dict[str, tuple[Any, ...]] = {
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
        library.declare(FUNCTIONS)
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
        wall = sum(self._request(*each) for each in requests)
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
