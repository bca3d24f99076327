"""What a user can get wrong about recording; importable without torch."""


class RecordError(Exception):
    """A model, checkpoint or prompt set cannot be recorded; the message names the thing and the fix."""
