"""The command line, one file per verb. Adding one is a file here, with a function of its name, and its name below.

A verb imports its stage when it runs, not at the top of its file, so that `--help` is instant.
"""

#: In the order in which `moereplay --help` lists them; a trailing underscore (a Python keyword) is not typed.
NAMES = (
    "record",
    "import_",
    "synthesise",
    "inspect",
    "replay",
    "live",
    "validate",
    "plot",
    "policies",
    "platforms",
    "models",
)
