"""What configurations, geometries and platforms are: immutable typed data without unknown keys."""

from __future__ import annotations

from typing import Any, ClassVar

from pydantic import BaseModel, ConfigDict, SerializerFunctionWrapHandler, model_serializer


class Frozen(BaseModel):
    """Immutable, and no unknown keys: a misspelt setting is an error, not a silence."""

    model_config = ConfigDict(frozen=True, extra="forbid")


class Sparse(Frozen):
    """What has figures that came later: those are left out of its document where they have their defaults.

    So documents of before, and their hashes, stay what they were.
    """

    later: ClassVar[frozenset[str]] = frozenset()

    @model_serializer(mode="wrap")
    def _said(self, whole: SerializerFunctionWrapHandler) -> dict[str, Any]:
        fields = {name: type(self).model_fields[name] for name in self.later}
        defaults = {name: field.get_default(call_default_factory=True) for name, field in fields.items()}
        unsaid = {name for name, default in defaults.items() if getattr(self, name) == default}
        return {name: value for name, value in whole(self).items() if name not in unsaid}
