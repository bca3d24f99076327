"""What the plain formats carry of a model: its name and its geometry, one JSON object under a key of ours.

{"moereplay": {"model": "mine", "layers": 2, "experts": 8, "k": 2, "expert_bytes": [1000, 1000]}}
"""

from __future__ import annotations

from typing import Any

from pydantic import ValidationError

from traces.documents import json_text
from traces.faults import first_fault
from traces.importers.text import parse_json
from traces.schema import Geometry, Header, TraceError, shown

KEY = "moereplay"


def state(header: Header) -> str:
    """The object, on one line."""
    return json_text({KEY: {"model": header.provenance.model} | header.geometry.model_dump(mode="json")})


def sizes_in(text: str, place: str) -> tuple[Geometry, str | None]:
    """Geometry and model name of such an object, found at `place`. Raises TraceError for what says no sizes."""
    document = parse_json(text, place)
    fields: Any = document.get(KEY) if isinstance(document, dict) else None
    if not isinstance(fields, dict):
        raise TraceError(f"{place}: {KEY} is not an object; expected the sizes of the model")
    model = fields.pop("model", None)
    try:
        return Geometry.model_validate(fields), model if isinstance(model, str | None) else shown(model)
    except ValidationError as wrong:
        raise TraceError(f"{place}: {first_fault(wrong)}; expected the sizes of the model") from wrong
