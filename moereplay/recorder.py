"""Record routing from a server: `from moereplay.recorder import Recorder`; docs/recorder.md has an example."""

from moereplay.packages import check

check()

from moereplay.traces.recorder import Recorder  # noqa: E402

__all__ = ["Recorder"]
