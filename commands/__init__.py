"""The command line, one file per verb. Adding one is a file here, with a function of its name, and its name below.

A verb imports its stage when it runs, not at the top of its file, so that `--help` is instant.
"""

if __name__ != "moereplay.commands":
    raise ImportError("import this package as moereplay.commands: a second copy of its modules would be loaded")

#: Verbs of a kind, with what they are about: `sweep_run` is typed as `sweep run`.
GROUPS = {
    "sweep": "Many configurations from one experiment file, stored as they are replayed.",
    "traces": "Traces made of traces, and libraries of them.",
}
#: In the order in which `moereplay --help` lists them; a trailing underscore (a Python keyword) is not typed.
NAMES = (
    "record",
    "import_",
    "synthesise",
    "export",
    "inspect",
    "split",
    "traces_list",
    "traces_get",
    "traces_publish",
    "traces_merge",
    "traces_slice",
    "traces_sample",
    "traces_append",
    "replay",
    "recommend",
    "timeline",
    "curve",
    "bounds",
    "sweep_run",
    "sweep_merge",
    "sweep_show",
    "sweep_compare",
    "sweep_schema",
    "tune",
    "live",
    "validate",
    "quality",
    "forecast",
    "measure",
    "calibrate",
    "evidence",
    "plot",
    "paper",
    "report",
    "policies",
    "presets",
    "platforms",
    "models",
)
