"""Model name and geometry in the plain formats: one JSON object under the key `moereplay`.

{"moereplay": {"model": "mine", "layers": 2, "experts": 8, "k": 2, "expert_bytes": [1000, 1000]}}
"""

from __future__ import annotations

from typing import Any, NamedTuple

from pydantic import ValidationError

from moereplay.traces.documents import json_text
from moereplay.traces.frozen import first_fault
from moereplay.traces.importers.text import parse_json
from moereplay.traces.schema import Geometry, Header, TraceError, shown
from moereplay.traces.synthetic import named_synthetic, synthetic

KEY = "moereplay"


class Stated(NamedTuple):
    """Values of the object."""

    geometry: Geometry
    model: str | None
    synthetic: str  #: how a generator made the routing; empty for recorded routing


def state(header: Header) -> str:
    """Return the object, on one line."""
    made = synthetic(header.provenance)
    said = {"model": header.provenance.model} | ({"synthetic": made} if made else {})
    return json_text({KEY: said | header.geometry.model_dump(mode="json")})


def sizes_in(text: str, place: str) -> Stated:
    """Read such an object, found at `place`. Raises TraceError if it has no sizes."""
    document = parse_json(text, place)
    fields: Any = document.get(KEY) if isinstance(document, dict) else None
    if not isinstance(fields, dict):
        raise TraceError(f"{place}: {KEY} is not a JSON object: expected the sizes of the model")
    model, made = fields.pop("model", None), fields.pop("synthetic", "")
    model = model if isinstance(model, str | None) else shown(model)
    made = (made if isinstance(made, str) else shown(made)) or named_synthetic(model or "")
    try:
        return Stated(Geometry.model_validate(fields), model, made)
    except ValidationError as wrong:
        raise TraceError(f"{place}: {first_fault(wrong)}") from wrong
