"""The command that repeats a replay names what is not at its default, and nothing else."""

from __future__ import annotations

from moereplay.results.settings import expert_lists, repeat_command
from moereplay.simulator.config import configure


def test_defaults_are_left_out_and_what_a_shell_would_read_is_quoted() -> None:
    config = configure(capacity="25%", prefetch="top_k:depth=2", seed=3).model_dump(mode="json")
    assert repeat_command(config, "my trace.zarr") == (
        "moereplay replay 'my trace.zarr' --capacity 25% --prefetch top_k:depth=2 --seed 3"
    )
    assert repeat_command(configure().model_dump(), "a.zarr") == "moereplay replay a.zarr"


def test_lists_are_read_from_files() -> None:
    config = configure(warm=((0, 1), (2, 3))).model_dump()
    assert repeat_command(config, "a.zarr") == "moereplay replay a.zarr --warm warm.json"
    assert expert_lists(config) == {"warm.json": [[0, 1], [2, 3]]}


def test_settings_that_older_results_lack_are_at_their_default() -> None:
    assert repeat_command({"eviction": "fifo", "capacity": "5%", "scope": None}, "a.zarr") == (
        "moereplay replay a.zarr --eviction fifo"
    )


def test_a_users_policy_goes_without_the_hash_of_its_file() -> None:
    assert repeat_command({"eviction": "mine@0f3a:k=2"}, "a.zarr", ["mine.py"]) == (
        "moereplay replay a.zarr --eviction mine:k=2 --policy-file mine.py"
    )
