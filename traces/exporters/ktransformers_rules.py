r"""Rules of KTransformers' YAML (`--optimize_config_path`), which keep the experts of whole layers on the GPU.

A rule replaces the modules whose names its pattern matches; of several that match, the first counts. So these stand
before the rule for all experts of the model's own file (ktransformers/optimize/optimize_rules). Modules are called
`model.layers.N.mlp.experts`, as in the models that it ships rules for; dense layers count.
"""

from __future__ import annotations

from collections.abc import Sequence

from moereplay.traces.exporters.contract import Answer, Exporter, Options, Target
from moereplay.traces.exporters.scores import dense_layers, scores
from moereplay.traces.geometry import held_layers, layers_by_worth
from moereplay.traces.schema import Trace

RULE = """- match:
    name: "^model\\\\.layers\\\\.({layers})\\\\.mlp\\\\.experts$"
  replace:
    class: ktransformers.operators.experts.KTransformersExperts
    kwargs:
      generate_device: "{device}"
      generate_op: "{operator}"
      out_device: "cuda:0"
  recursive: False
"""


def write(trace: Trace, options: Options, target: Target) -> Answer:
    """A rule for the layers that are worth most of what fits `cache_bytes`, and one for the others."""
    geometry, (before, said) = trace.geometry, dense_layers(trace, options)
    held = held_layers(geometry, options.cache_bytes or 0, layers_by_worth(geometry, scores(trace, options)))
    others = [layer for layer in range(geometry.layers) if layer not in held]
    rules = [rule(held, before, "cuda:0", "KExpertsMarlin"), rule(others, before, "cpu", "KExpertsCPU")]
    with target.open() as file:
        file.write("".join(rules).encode())
    note = f"the experts of {len(held)} of {geometry.layers} layers stay on the GPU, in Marlin's 4 bits"
    fix = "put the model's own rules for everything else behind them"
    return Answer("python ktransformers/local_chat.py --optimize_config_path {path}", (note, fix, *said))


def rule(layers: Sequence[int], before: int, device: str, operator: str) -> str:
    """The rule of these MoE layers; none for no layers."""
    numbers = "|".join(str(before + layer) for layer in layers)
    return RULE.format(layers=numbers, device=device, operator=operator) if layers else ""


EXPORTER = Exporter(
    name="ktransformers-rules",
    summary="rules of KTransformers' YAML that keep whole layers of experts on the GPU, as many as fit",
    writes="NAME.yaml",
    write=write,
    keeps=frozenset(),
    loses=("placement of single experts",),
    takes=frozenset({"cache_bytes", "ranking", "dense_layers"}),
    needs=frozenset({"cache_bytes"}),
)
