"""Expert counts of other tools, without token order. A format is a `Form` in a module, and a row of `MODULES`."""

#: Formats in the order in which they are tried, and the module whose constant of that name, in capitals, is the form.
MODULES = {
    "imatrix": "arrays",
    "coli_usage": "texts",
    "activation_matrix": "arrays",
    "hot_cache": "texts",
    "activation_map": "texts",
    "count_table": "texts",
    "count_archive": "arrays",
}
NAMES = tuple(MODULES)
