"""Libraries of other people's quantisers, imported when first used, and quietly."""

from __future__ import annotations

import logging
import warnings
from contextlib import redirect_stderr, redirect_stdout
from functools import cache
from importlib import import_module
from importlib.metadata import version
from io import StringIO
from types import ModuleType

from moereplay.tracegen.errors import RecordError
from moereplay.traces.installation import install_command


@cache
def imported(module: str) -> ModuleType:
    """A module of such a library. What it says of kernels that this machine lacks is not said: none is used here.

    Raises RecordError where it is not installed, or cannot be loaded.
    """
    before = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        with warnings.catch_warnings(), redirect_stderr(StringIO()), redirect_stdout(StringIO()):
            warnings.simplefilter("ignore")
            return import_module(module)
    except (ImportError, OSError) as error:
        library = module.partition(".")[0]
        fix = f"{install_command('quant')}, or take quantiser affine"
        raise RecordError(f"{library} cannot be imported ({str(error).splitlines()[0]}): {fix}") from None
    finally:
        logging.disable(before)


def version_of(library: str | None) -> str:
    """Of an installed library; empty for none."""
    return version(library) if library else ""
