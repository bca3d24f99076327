"""The command line, one file per noun. To add a verb, write a function of its name and list it below.

The file of a verb is imported when the verb is typed; `--help` is printed from this table.
"""

if __name__ != "moereplay.commands":
    raise ImportError("import this package as moereplay.commands: a second copy of its modules would be loaded")

#: Verbs by purpose, each with its line in `--help`, which cuts lines after 60 characters.
#: A trailing underscore (a Python keyword) is not typed; `sweep_run` is typed as `sweep run`.
VERBS = {
    "Record and import": {
        "record": "Record a model's routing into a trace",
        "import_": "Convert another tool's routing trace",
        "synthesise": "Make a synthetic trace with a known model's geometry",
        "routing_fit": "Fit a routing model to a trace",
        "routing_list": "List routing models",
        "routing_show": "Print a routing model",
        "inspect": "Check a trace and summarise its routing",
        "split": "Split a trace by requests",
        "export": "Write a trace or a placement for other tools and engines",
        "traces_list": "List the traces of a library",
        "traces_get": "Copy a trace from a library",
        "traces_publish": "Add a trace to a library",
        "traces_merge": "Join traces into one",
        "traces_slice": "Copy a range of requests",
        "traces_sample": "Copy a sample of requests",
        "traces_append": "Add a trace's requests to another trace",
    },
    "Replay and compare": {
        "replay": "Replay a trace under one or many configurations",
        "sweep_run": "Run an experiment; a rerun continues it",
        "sweep_merge": "Join the results of several machines",
        "sweep_show": "Print results: rankings, intervals, tables",
        "sweep_compare": "Compare one configuration with the others, request by request",
        "sweep_schema": "Print the JSON schema of experiment files",
        "tune": "Search a space of configurations for its Pareto set",
        "claim": "Test a hypothesis about one setting on traces",
        "bench_run": "Enter policies in the benchmark of expert caches",
        "bench_verify": "Run rows of the benchmark again, and compare them",
        "bench_table": "Print rows of the benchmark as a page",
        "paper": "Reproduce a paper's figures and tables from a trace",
        "plot": "Draw figures from results",
        "timeline": "Write one replay as a timeline for ui.perfetto.dev",
    },
    "Ask": {
        "recommend": "Recommend policies for a memory size, with their speed",
        "report": "Write results as one HTML page",
        "curve": "Count misses at every capacity in one pass",
        "bounds": "Compute upper bounds on hit rate and throughput",
    },
    "Check against the model and the machine": {
        "live": "Run a model under one policy set",
        "validate": "Compare replays with live runs of the model",
        "quality": "Measure perplexity and tasks under policy sets",
        "forecast": "Estimate the quality loss of policies that were not run",
        "measure": "Compare predicted times with real offloading",
        "calibrate_logs": "Fit a platform to per-token logs of an engine",
        "calibrate_folder": "Fit a platform to published runs in a folder",
        "calibrate_series": "Fit a platform to one or two measured runs, predict others",
        "calibrate_machine": "Measure this machine, and fit a platform to it",
        "evidence": "Compare predictions of a calibration with measured runs",
        "verify": "Compare an engine's own hits and times with a replay",
    },
    "Look up": {
        "policies": "List or explain policies",
        "presets": "List or explain configurations of papers and engines",
        "platforms": "List, show or make machines: this one, or one from its parts",
        "models": "List or show known models",
    },
}
#: Verbs with subcommands: the heading of `--help` that lists each, and its line.
GROUPS = {
    "traces": ("Record and import", "Merge, slice, append and share traces"),
    "routing": ("Record and import", "Fit, list and show statistics of models' routing"),
    "sweep": ("Replay and compare", "Replay many configurations from an experiment file"),
    "bench": ("Replay and compare", "Score policies on a suite, between LRU and Belady"),
    "calibrate": ("Check against the model and the machine", "Fit a platform to measured runs, or to this machine"),
}
NAMES = tuple(name for verbs in VERBS.values() for name in verbs)
#: Verbs that another file than their own defines.
FILES = {
    "traces": ("inspect", "split", "synthesise", *(name for name in NAMES if name.startswith("traces_"))),
    "replay": ("timeline",),
    "sweep": ("sweep_run", "sweep_merge", "sweep_schema", "tune"),
    "sweep_results": ("sweep_show", "sweep_compare"),
    "report": ("plot",),
    "bounds": ("curve",),
    "quality": ("forecast",),
    "bench": ("bench_run", "bench_verify", "bench_table"),
    "calibrate": tuple(name for name in NAMES if name.startswith("calibrate_")),
    "verify": ("evidence",),
    "catalogue": ("policies", "presets", "platforms", "models", "routing_fit", "routing_list", "routing_show"),
}


def listed() -> dict[str, list[tuple[str, str]]]:
    """Return what `--help` lists: by heading, each verb or group as typed, with its line."""
    found: dict[str, list[tuple[str, str]]] = {}
    for heading, verbs in VERBS.items():
        single = [(name.rstrip("_"), line) for name, line in verbs.items() if name.split("_")[0] not in GROUPS]
        found[heading] = single + [(group, line) for group, (place, line) in GROUPS.items() if place == heading]
    return found


def file_of(name: str) -> str:
    """Return the module in this package that defines a verb."""
    return next((file for file, verbs in FILES.items() if name in verbs), name)
