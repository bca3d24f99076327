"""Turn public prompt sets into tasks for `quality` that need no network.

Last changed in commit 0a7c2f56. What do ten policy sets cost on public prompt sets?
Answer: docs/quality.md.

    python -m studies.prompt_tasks PROMPTS OUT       # writes OUT/*.yaml and their questions

PROMPTS holds gsm8k/test.jsonl, truthfulqa/TruthfulQA.csv and nq_open/NQ-open.dev.jsonl as their authors publish them.
TruthfulQA: the best answer or the best incorrect one. GSM8K: the number behind the answer, in the model's own words.
NQ-open: how likely the first answer is. Fewer shots and shorter prompts than the harness's own tasks of these names,
so their figures cannot be compared with published ones. `make study-tasks PROMPTS=...` runs all of it on the
miniature.
"""

from __future__ import annotations

import argparse
import csv
import json
from collections.abc import Iterator, Mapping
from pathlib import Path

from moereplay.traces.documents import json_text

TASKS = {
    "truthfulqa": """output_type: multiple_choice
doc_to_text: "Q: {{question}}\\nA:"
doc_to_choice: "{{[' ' + right, ' ' + wrong]}}"
doc_to_target: 0
metric_list:
  - {metric: acc, aggregation: mean, higher_is_better: true}
""",
    "gsm8k": """output_type: generate_until
generation_kwargs: {until: ["Q:"], max_gen_toks: 24, do_sample: false}
doc_to_text: "Q: {{question}}\\nA: The answer is"
doc_to_target: "{{right}}"
filter_list:
  - name: number
    filter:
      - {function: regex, regex_pattern: "(-?[0-9][0-9,]*)"}
      - {function: take_first}
metric_list:
  - {metric: exact_match, aggregation: mean, higher_is_better: true}
""",
    "nq_open": """output_type: loglikelihood
doc_to_text: "Q: {{question}}?\\nA:"
doc_to_target: " {{right}}"
metric_list:
  - {metric: perplexity, aggregation: perplexity, higher_is_better: false}
  - {metric: acc, aggregation: mean, higher_is_better: true}
""",
}


def main() -> None:
    """Write a YAML file and a file of questions per task."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("prompts", type=Path)
    parser.add_argument("out", type=Path)
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    for name, text in TASKS.items():
        questions = options.out / f"{name}.jsonl"
        rows = READERS[name](options.prompts)
        questions.write_text("".join(json_text(row) + "\n" for row in rows), encoding="utf-8")
        data = f"dataset_path: json\ndataset_kwargs:\n  data_files: {{test: {questions}}}\ntest_split: test\n"
        (options.out / f"{name}.yaml").write_text(f"task: {name}\n{data}{text}", encoding="utf-8")
        print(f"wrote {options.out / name}.yaml")


def truthfulqa(prompts: Path) -> Iterator[Mapping[str, str]]:
    """Yield the question, the best answer and the best incorrect answer."""
    with (prompts / "truthfulqa" / "TruthfulQA.csv").open(encoding="utf-8", newline="") as file:
        for row in csv.DictReader(file):
            yield {"question": row["Question"], "right": row["Best Answer"], "wrong": row["Best Incorrect Answer"]}


def gsm8k(prompts: Path) -> Iterator[Mapping[str, str]]:
    """Yield the question and the number after ####."""
    for row in _lines(prompts / "gsm8k" / "test.jsonl"):
        yield {"question": row["question"], "right": row["answer"].rpartition("####")[2].strip()}


def nq_open(prompts: Path) -> Iterator[Mapping[str, str]]:
    """Yield the question and the first accepted answer."""
    for row in _lines(prompts / "nq_open" / "NQ-open.dev.jsonl"):
        yield {"question": row["question"], "right": row["answer"][0]}


def _lines(path: Path) -> Iterator[dict]:
    for line in path.read_text(encoding="utf-8").splitlines():
        yield json.loads(line)


READERS = {"truthfulqa": truthfulqa, "gsm8k": gsm8k, "nq_open": nq_open}

if __name__ == "__main__":
    main()
