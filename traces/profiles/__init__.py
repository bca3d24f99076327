"""Other tools' counts of experts, without order. To add a form: a module with a `FORM`, and its name in `NAMES`."""

#: In the order of sniffing.
NAMES = ("imatrix", "coli_usage", "activation_matrix", "hot_cache", "activation_map", "count_table", "count_archive")
