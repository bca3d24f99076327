"""YAML within limits. It reads no, off and yes as booleans: quote them."""

from __future__ import annotations

from typing import Any

from sweeps.extras import extra
from traces.documents import DocumentError, checked, fault_of
from traces.schema import shown

MOST_BYTES = 1 << 20  #: PyYAML reads a megabyte in some ten seconds
MOST_VALUES = 1_000_000  #: with what aliases stand for


def from_yaml(content: bytes) -> Any:
    """What a YAML text says. Raises DocumentError, ConfigError without PyYAML."""
    yaml = extra("yaml", "yaml")
    if len(content) > MOST_BYTES:
        raise DocumentError(f"{len(content):,} bytes of YAML, more than {MOST_BYTES:,}; write it in TOML")
    try:
        loader = yaml.SafeLoader(content.decode())
        root = loader.get_single_node()
        if root is None:
            return None
        _check_size(root)
        document = checked(loader.construct_document(root))
    except DocumentError:
        raise
    except RecursionError:
        raise DocumentError("nested too deep") from None
    except (yaml.YAMLError, ValueError, AttributeError, TypeError, KeyError, OverflowError) as broken:
        # PyYAML's constructors raise what they come across: dates, numbers and tags are anybody's
        raise fault_of(broken) from None
    _check_keys(document)
    return document


def _check_size(root: Any) -> None:
    """An alias costs a few letters and stands for all that was named: small files can be endless."""
    sizes: dict[int, int] = {}
    if _size(root, sizes) > MOST_VALUES:
        raise DocumentError(f"its aliases stand for more than {MOST_VALUES:,} values")


def _size(node: Any, sizes: dict[int, int]) -> int:
    """Values that a node stands for; 0 in `sizes` marks those that are being counted."""
    if sizes.get(id(node)) == 0:
        raise DocumentError("an alias stands for a list or table that it is itself in")
    if id(node) not in sizes:
        sizes[id(node)] = 0
        inside = node.value if isinstance(node.value, list) else []
        pairs = [each for entry in inside for each in (entry if isinstance(entry, tuple) else (entry,))]
        sizes[id(node)] = 1 + sum(_size(each, sizes) for each in pairs)
    return sizes[id(node)]


def _check_keys(document: Any) -> None:
    if isinstance(document, list):
        for value in document:
            _check_keys(value)
    if isinstance(document, dict):
        for key, value in document.items():
            if not isinstance(key, str):
                raise DocumentError(f"the key {shown(key)} is no text; write it in quotes")
            _check_keys(value)
