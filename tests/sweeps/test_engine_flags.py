"""A cache in the words of engines: by hand, for a model of 4 layers of 8 experts in a memory of 100 MB."""

from moereplay.simulator.capacity import Memory
from moereplay.sweeps.recommend.document import Setup, flags
from moereplay.sweeps.recommend.engines import NAMES
from moereplay.traces.schema import Geometry

GEOMETRY = Geometry(layers=4, experts=8, k=2, expert_bytes=(1_000_000,) * 4)
MEMORY = Memory(100_000_000, 30_000_000, 0, 50_000_000)


def test_a_cache_of_18_experts():
    """Two whole layers are 16 experts; 18 are 4 of each of 4 layers."""
    said = flags(Setup(GEOMETRY, MEMORY, 18_000_000, beside_cpu=True))
    assert (said["cache_mib"], said["slots"], said["slots_per_layer"]) == (17, 18, 4)
    assert said["llama.cpp"] == "-ngl 99 --n-cpu-moe 2"
    assert str(said["ktransformers"]).split()[:2] == ["--kt-num-gpu-experts", "4"]
    assert said["moe-infinity"] == "device_memory_ratio=0.48"
    assert said["mixtral-offloading"] == "offload_per_layer=4"


def test_all_of_them_and_none_of_them():
    assert flags(Setup(GEOMETRY, MEMORY, 32_000_000, beside_cpu=True))["llama.cpp"] == "-ngl 99 --n-cpu-moe 0"
    said = flags(Setup(GEOMETRY, MEMORY, 3_999_999, beside_cpu=True))
    assert said["llama.cpp"] == "-ngl 99 --n-cpu-moe 4" and "--kt-num-gpu-experts 0" in str(said["ktransformers"])


def test_a_phone_has_no_gpu_to_set_up():
    assert not set(NAMES) & set(flags(Setup(GEOMETRY, MEMORY, 18_000_000, beside_cpu=False)))


def test_experts_of_two_sizes_are_counted_alike_everywhere():
    """39 layers of 5.0625 MiB and 8 of 18: 65 of each layer, 3,055, and room for 3,084 of mean size."""
    small, large = 5_308_416, 18 * 2**20
    geometry = Geometry(layers=47, experts=256, k=10, expert_bytes=(large,) * 8 + (small,) * 39)
    said = flags(Setup(geometry, MEMORY, 23_500_000_000, beside_cpu=True))
    assert (said["slots_per_layer"], said["slots"], said["unequal"]) == (65, 3_084, True)
    whole = flags(Setup(geometry, MEMORY, 256 * (8 * large + 39 * small), beside_cpu=True))
    assert (whole["slots_per_layer"], whole["slots"]) == (256, 47 * 256)
