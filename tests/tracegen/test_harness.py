"""Tasks of lm-evaluation-harness: the unmodified model answers as in the harness itself, example by example."""

from __future__ import annotations

from collections.abc import Iterator
from copy import copy
from pathlib import Path
from typing import Any

import pytest

from moereplay.simulator.config import Origin, configure
from moereplay.simulator.replay import plan_for
from moereplay.tracegen.checkpoint import Loaded, load
from moereplay.tracegen.errors import RecordError
from moereplay.tracegen.live.requests import CAPABILITIES
from moereplay.tracegen.live.run import proven
from moereplay.tracegen.modules import MoeModules
from moereplay.tracegen.quality.harness import Asking, HarnessTask, known_tasks, sha256_of, tasks_of
from moereplay.tracegen.quality.session import Session, Subject
from tests.kit.every import every

TASKS = Path(__file__).resolve().parents[1] / "tasks"
#: A choice among answers and a text that is written take seconds, perplexity of a whole text a quarter of a minute.
SOME = ["next_word", "answer", pytest.param("whole_text", marks=pytest.mark.longest)]
CHAT = "{% for each in messages %}{{ each.role }}: {{ each.content }}\n{% endfor %}"

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")


@pytest.fixture(scope="module", autouse=True)
def few_tasks() -> Iterator[None]:
    """To read the files of all 13,000 tasks of the harness takes ten seconds, and to describe the machine one more."""
    from lm_eval import evaluator, tasks

    shipped, every_task = Path(tasks.__file__).parent, tasks.TaskManager
    few: list[str | Path] = [shipped / "gsm8k", shipped / "arc"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tasks, "TaskManager", lambda: every_task(include_path=few, include_defaults=False))
        patch.setattr(evaluator, "add_env_info", lambda results: None)
        known_tasks.cache_clear()
        yield
    known_tasks.cache_clear()


@pytest.fixture(scope="module")
def miniature() -> tuple[Loaded, MoeModules]:
    loaded = load("miniature", device="cpu", dtype="float32")
    return loaded, proven(loaded)


@pytest.fixture(autouse=True)
def beside_the_tasks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Paths in a task are those of the folder in which one works."""
    monkeypatch.chdir(TASKS)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")


def session(miniature: tuple[Loaded, MoeModules], batch: int = 1, **settings: Any) -> Session:
    loaded, modules = miniature
    origin = Origin(modules.geometry, CAPABILITIES, modules.geometry.layers, "live", "miniature", live=True)
    config = configure(**{"capacity": "25%", "reset": "request", **settings})
    return Session(Subject(loaded, modules, plan_for(origin, config) if settings else None, 0), batch)


def task(name: str, limit: int | None = None, shots: int | None = None, chat: bool = False) -> HarnessTask:
    return HarnessTask(f"{name}.yaml", limit, 0, shots, chat)


def of_the_harness(loaded: Loaded, name: str, **asked: Any) -> Any:
    from lm_eval import evaluator
    from lm_eval.models.huggingface import HFLM

    own: Any = HFLM
    evaluate: Any = evaluator.simple_evaluate
    plain = own(pretrained=loaded.model, tokenizer=loaded.tokenizer, backend="causal", batch_size=1)
    seeds = dict.fromkeys(("random_seed", "numpy_random_seed", "torch_random_seed", "fewshot_random_seed"), 0)
    return evaluate(plain, tasks=[f"{name}.yaml"], bootstrap_iters=0, task_manager=known_tasks(), **seeds, **asked)


@pytest.mark.slow
@pytest.mark.parametrize("name", SOME)
def test_the_unmodified_model_is_lm_evaluation_harness_on_the_plain_model(miniature, name: str) -> None:
    theirs = of_the_harness(miniature[0], name)
    ours = task(name).answers(session(miniature, batch=3))
    for measure in ours.measures:
        assert measure.value == pytest.approx(theirs["results"][name][f"{measure.name},none"], rel=1e-5)
    metrics = theirs["samples"][name][0]["metrics"]
    for sample in theirs["samples"][name]:
        mine = [each for each in ours.examples if each.example == f"{name}/{sample['doc_id']}"]
        assert [each.measure for each in mine] == metrics
        if name != "whole_text":
            assert [each.value for each in mine] == [sample[metric] for metric in metrics]
        else:
            likelihood, words = sample["word_perplexity"]
            assert mine[0].value == pytest.approx(-likelihood / words, rel=1e-5) and mine[0].weight == words


@pytest.mark.slow
@pytest.mark.parametrize(("name", "shots", "chat"), (("next_word", 2, False), ("answer", 1, True)))
def test_examples_before_a_question_and_chat_templates_are_the_harness_s(miniature, name: str, shots, chat) -> None:
    loaded, modules = miniature
    tokenizer = copy(loaded.tokenizer)
    tokenizer.chat_template = CHAT if chat else None
    talking = loaded._replace(tokenizer=tokenizer)
    theirs = of_the_harness(talking, name, limit=3, num_fewshot=shots, apply_chat_template=chat)["samples"][name]
    ours = task(name, 3, shots, chat).answers(session((talking, modules)))
    metric = theirs[0]["metrics"][0]
    assert [each.value for each in ours.examples] == [sample[metric] for sample in theirs]
    assert [each.prompt_sha256 for each in ours.examples] == [sha256_of(repr(each["arguments"])) for each in theirs]
    without = task(name, 3).answers(session(miniature))
    assert not {each.prompt_sha256 for each in ours.examples} & {each.prompt_sha256 for each in without.examples}


def test_chat_without_a_template_is_refused_with_the_task(miniature) -> None:
    with pytest.raises(RecordError, match="--chat: this checkpoint's tokenizer has no chat template"):
        task("answer", chat=True).answers(session(miniature))


@pytest.mark.long
@pytest.mark.parametrize("name", SOME)
def test_batched_is_one_by_one_under_policies(miniature, name: str) -> None:
    settings: dict[str, Any] = {"routing": "cache_prior:lam=.5", "eviction": "random"}
    alone, together = session(miniature, **settings), session(miniature, batch=3, **settings)
    asked = task(name, 2 if name == "next_word" else 4)  # four texts: three together, and one
    one, other = asked.answers(alone), asked.answers(together)
    assert [each.value for each in one.examples] == pytest.approx([each.value for each in other.examples], rel=1e-4)
    first, second = alone.close(), together.close()
    assert first.totals["misses"] == second.totals["misses"] and first.totals["time_ns"] == second.totals["time_ns"]


@pytest.mark.slow
def test_policies_that_change_nothing_answer_as_the_unmodified_model(miniature) -> None:
    asked = task("answer", limit=2)
    assert asked.answers(session(miniature, eviction="least_stale")) == asked.answers(session(miniature))


def test_what_is_wrong_with_a_task_is_said_with_its_name(miniature, tmp_path: Path) -> None:
    broken = tmp_path / "broken.yaml"
    broken.write_text("task: broken\noutput_type: generate_until\ndataset_path: json\ntest_split: test\n")
    with pytest.raises(RecordError, match=r"task .*broken\.yaml: "):
        HarnessTask(str(broken), None, 0, None, False).answers(session(miniature))
    beams = tmp_path / "beams.yaml"
    beams.write_text((TASKS / "answer.yaml").read_text().replace("do_sample: false", "num_beams: 4"))
    with pytest.raises(RecordError, match="generation setting 'num_beams' of this task is not supported"):
        HarnessTask(str(beams), None, 0, None, False).answers(session(miniature))


def test_a_task_that_the_harness_does_not_know_is_refused_with_the_nearest() -> None:
    with pytest.raises(RecordError, match="unknown task 'gsm8': did you mean gsm8k"):
        tasks_of(["gsm8"], Asking())
    (known,) = tasks_of(["gsm8k"], Asking(limit=2))
    assert known.name == "gsm8k" and known.definition[0] == "lm-eval"


def test_a_task_is_another_when_its_data_are(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("answer.yaml", "questions.jsonl"):
        (tmp_path / name).write_bytes((TASKS / name).read_bytes())
    before = task("answer").definition
    assert before == task("answer").definition != task("answer", limit=1).definition
    (tmp_path / "questions.jsonl").write_text('{"text": "a", "right": "b", "wrong": "c"}\n')
    assert task("answer").definition != before


@pytest.mark.parametrize("changed", ("more.yaml", "scores.py", "imported_by_scores.py"))
def test_a_task_is_another_when_what_it_includes_is(tmp_path: Path, changed: str) -> None:
    (tmp_path / "mine.yaml").write_text("task: mine\ninclude: more.yaml\nprocess_results: !function scores.of\n")
    (tmp_path / "more.yaml").write_text("dataset_path: json\n")
    (tmp_path / "scores.py").write_text("def of(doc, results):\n    return {}\n")
    (tmp_path / "imported_by_scores.py").write_text("WEIGHT = 1\n")
    asked = HarnessTask(str(tmp_path / "mine.yaml"), None, 0, None, False)
    before = asked.definition
    assert asked.definition == before
    (tmp_path / changed).write_text((tmp_path / changed).read_text() + "# other\n")
    assert asked.definition != before


NO_TASKS = {
    "": "Expected YAML dict",
    "a: [1": "expected",
    "- 1": "got list",
    "include: none.yaml": "No such file",
    "task: mine": "missing `dataset_path`: add one",
    "dataset_path: json": "missing `task`",
    "group: mine\ntask: [arc_easy, arc_challenge]": "a list of tasks, not a task; pass them one by one",
}


@every("text", NO_TASKS, apart=True)
def test_a_file_that_is_no_task_is_refused_before_the_model_is_loaded(tmp_path: Path, text: str) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text(text)
    with pytest.raises(RecordError, match=rf"task {path}: .*{NO_TASKS[text]}"):
        tasks_of([str(path)], Asking())


def test_a_list_of_tasks_that_has_no_figure_is_refused_with_their_names() -> None:
    with pytest.raises(RecordError, match=r"ai2_arc is a list of tasks .*: arc_challenge, arc_easy"):
        tasks_of(["ai2_arc"], Asking())


def test_a_task_without_a_figure_is_refused_by_name(miniature, monkeypatch: pytest.MonkeyPatch) -> None:
    """As a group that aggregates nothing."""
    found = {
        "results": {"bare": {"alias": "bare", " ": " "}},
        "samples": {"one": [], "two": []},
        "higher_is_better": {},
    }
    monkeypatch.setattr(HarnessTask, "_evaluated", lambda self, session: found)
    with pytest.raises(RecordError, match=r"task bare has no numeric score of its own.* it consists of one, two"):
        HarnessTask("bare", 1, 0, None, False).answers(session(miniature))
