"""Record routing from a server: `from moereplay.recorder import Recorder`; docs/recorder.md has an example."""

from moereplay.traces.recorder import Recorder

__all__ = ["Recorder"]
