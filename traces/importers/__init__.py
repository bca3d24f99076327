"""Other tools' traces. To add a format: one module here with an `IMPORTER`, and its name in `NAMES`."""

#: In the order of sniffing; `generic` claims every csv and jsonl, so it comes last.
NAMES = (
    "gptoss_npz",
    "layers_npz",
    "gptoss_json",
    "route_trace",
    "token_lines",
    "arrays",
    "exported",
    "columns",
    "generic",
)
