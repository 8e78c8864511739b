"""`batchgen plan` says before a run what the run will then do."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from batchgen.cli import commands
from batchgen.forecast.estimate import REACHED

INSTRUCTION = "Answer in one word, and never in two or more of them."


def plan(job_folder: Any, *options: str, **sections: Any) -> dict[str, Any]:
    done = CliRunner().invoke(commands, ["plan", str(job_folder.save(**sections)), "--json", *options])
    assert done.exit_code == 0, done.output
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def rows(num_documents: int = 6, num_questions: int = 5) -> list[dict[str, Any]]:
    """Every question on every document, the questions apart."""
    return [
        {"doc": f"{number:02} " + "lorem ipsum " * 5, "question": f"{question}?"}
        for question in range(num_questions)
        for number in range(num_documents)
    ]


@pytest.fixture
def documents(job_folder: Any) -> Any:
    """Thirty rows in six groups, one of them twice, one bad, one too long."""
    table = rows()
    table += [table[3], {"doc": None, "question": "?"}, {"doc": "x" * 3000, "question": "?"}]
    job_folder.write("rows.jsonl", table)
    job_folder.save(
        prompt={"text": "Read: {{ doc }} {{ question }}"}, limits={"failed_rows": 2}, engine={"page_size": 16}
    )
    return job_folder


def test_the_run_computes_what_was_planned(documents: Any) -> None:
    planned = plan(documents)
    assert not documents.out.exists()
    assert documents.run().exit_code == 0
    report = json.loads((documents.out / "manifest.json").read_text())["report"]
    assert report["computed_tokens"] == report["planned_tokens"] == planned["computed_tokens"]
    assert report["prompt_tokens"] == planned["prompt_tokens"]
    assert report["merged_rows"] == planned["merged_rows"] == 1


def test_rows_groups_and_failures(documents: Any) -> None:
    found = plan(documents, "--groups", "2")
    assert (found["rows"], found["prompts"], found["windows"]) == (33, 31, 1)
    assert found["failed"] == {"template_undefined": 1, "prompt_too_long": 1}
    assert (found["num_groups"], found["grouped_rows"]) == (6, 30)
    assert len(found["largest_groups"]) == 2
    assert found["largest_groups"][0]["rows"] == 5
    assert found["largest_groups"][0]["prefix_tokens"] == 64
    assert found["largest_groups"][0]["start"].startswith("Read: 0")
    assert found["distinct_tokens"] <= found["computed_tokens"] < found["prompt_tokens"] // 2


@pytest.mark.parametrize(
    ("overlong", "counts"),
    [
        ("error", {"failed": {"template_undefined": 1, "prompt_too_long": 1}, "skipped": 0, "truncated": 0}),
        ("skip", {"failed": {"template_undefined": 1, "prompt_too_long": 1}, "skipped": 1, "truncated": 0}),
        ({"truncate": {"field": "doc"}}, {"failed": {"template_undefined": 1}, "skipped": 0, "truncated": 1}),
    ],
)
def test_over_long_rows_by_policy(documents: Any, overlong: Any, counts: dict[str, Any]) -> None:
    found = plan(documents, limits={"overlong": overlong})
    assert {name: found[name] for name in counts} == counts


def test_windows_are_planned_apart(documents: Any) -> None:
    found = plan(documents, plan={"window": 10})
    assert found["windows"] == 4
    assert found["computed_tokens"] > plan(documents, plan={"window": "all"})["computed_tokens"]


def test_cache_fit_is_the_formula(documents: Any) -> None:
    """2 layers, 2 KV heads of 12, keys and values, 4 bytes each."""
    cache = plan(documents, engine={"kv_memory": "1MiB"})["cache"]
    assert cache["bytes_per_token"] == 2 * 2 * 2 * 12 * 4
    assert cache["tokens"] == 2**20 // 384
    assert cache["longest_row"] == len("Read: 00 " + "lorem ipsum " * 5 + " 0?") + 4
    samples = plan(documents, generate={"n": 3, "temperature": 1.0})["cache"]
    assert samples["longest_row"] == cache["longest_row"], "samples need not run at once"


def test_a_machine_gives_a_bound_and_its_page_size(documents: Any) -> None:
    del documents.job["engine"]["page_size"]
    found = plan(documents, "--machine", "h200")
    assert found["page_size"] == 64
    assert found["cache"]["machine"] == "h200"
    assert 0 < found["time"]["least_seconds"] < found["time"]["seconds"] < 1
    assert "of its roofline that one H200 reached with qwen-0.5b" in found["time"]["basis"]


def test_a_pilot_tells_a_machine_how_long_answers_are(documents: Any) -> None:
    """The model never stops of its own, and rows stop at a letter that it soon comes to."""
    options = ("--machine", "h200", "--pilot", "3")
    found = plan(documents, *options, generate={"max_tokens": 50, "ignore_eos": True})["time"]
    assert "answers of 50.0 tokens, as those of 3 rows run here" in found["basis"]
    assert found["output_tokens"] == 50 * 30
    stops = [chr(letter) for letter in range(ord(" "), ord("~"))]
    found = plan(documents, *options, generate={"stop": stops})["time"]
    length = float(found["basis"].split("answers of ")[1].split()[0])
    assert length < 50
    assert found["output_tokens"] == 30 * max(1, round(length))


def test_without_a_cache_nothing_is_shared_in_plan_or_run(documents: Any) -> None:
    sections: dict[str, Any] = {"engine": {"page_size": 16, "prefix_caching": False}}
    planned = plan(documents, **sections)
    assert documents.run(**sections).exit_code == 0
    report = json.loads((documents.out / "manifest.json").read_text())["report"]
    assert (
        planned["computed_tokens"] == report["planned_tokens"] == report["computed_tokens"] > planned["distinct_tokens"]
    )


def test_what_a_machine_reached_is_what_was_measured() -> None:
    lines = (Path(__file__).parents[2] / "docs" / "benchmarks" / "results.jsonl").read_text().splitlines()
    results = [result for line in lines if "roofline_share" in (result := json.loads(line))]
    for machine, models in REACHED.items():
        for reached in models:
            mine = [r for r in results if r["model"] == reached.model and machine in r["hardware"].lower()]
            assert {reached.least, reached.most} <= {result["roofline_share"] for result in mine}


def test_a_pilot_runs_rows_and_writes_nothing(documents: Any) -> None:
    found = plan(documents, "--pilot", "3")
    assert found["time"]["basis"].startswith("3 rows run here: ")
    assert found["time"]["output_tokens"] == pytest.approx(4 * 30, abs=90)
    assert found["time"]["seconds"] > 0
    assert not documents.out.exists()


@pytest.mark.parametrize("is_late", [True, False])
def test_advice_on_a_text_behind_what_changes(job_folder: Any, is_late: bool) -> None:
    job_folder.write("rows.jsonl", rows(8, 1))
    parts = ["{{ doc }}", INSTRUCTION] if is_late else [INSTRUCTION, "{{ doc }}"]
    found = plan(job_folder, prompt={"text": " ".join(parts)}, engine={"page_size": 1})
    if not is_late:
        assert found["advice"] == []
        return
    (advice,) = found["advice"]
    assert (advice["field"], advice["text"]) == ("prompt.text", INSTRUCTION)
    moved = plan(job_folder, prompt={"text": f"{INSTRUCTION}\n\n{{{{ doc }}}}"})
    assert advice["saved_tokens"] == found["computed_tokens"] - moved["computed_tokens"] > 7 * 50


def test_advice_on_a_text_behind_another_message(job_folder: Any) -> None:
    job_folder.write("rows.jsonl", rows(8, 1))
    given = [{"role": "system", "content": "{{ doc }}"}, {"role": "user", "content": INSTRUCTION + " {{ question }}"}]
    found = plan(job_folder, prompt={"messages": given}, engine={"page_size": 1})
    (advice,) = found["advice"]
    assert (advice["field"], advice["text"], advice["rows"]) == ("prompt.messages.1.content", INSTRUCTION, 8)
    moved = [
        {"role": "system", "content": INSTRUCTION + "\n\n{{ doc }}"},
        {"role": "user", "content": "{{ question }}"},
    ]
    then = plan(job_folder, prompt={"messages": moved})
    assert advice["saved_tokens"] == found["computed_tokens"] - then["computed_tokens"]


def test_advice_recounts_the_first_window(job_folder: Any) -> None:
    job_folder.write("rows.jsonl", rows(8, 1))
    found = plan(job_folder, prompt={"text": "{{ doc }} " + INSTRUCTION}, engine={"page_size": 1}, plan={"window": 4})
    assert found["windows"] == 2
    (advice,) = found["advice"]
    assert advice["rows"] == 4
    assert 3 * 50 < advice["saved_tokens"] < 4 * 60


def test_no_advice_where_the_text_is_shared_anyway(job_folder: Any) -> None:
    """All rows have the same document: what comes behind it is shared too."""
    job_folder.write("rows.jsonl", rows(1, 8))
    assert plan(job_folder, prompt={"text": "{{ doc }} " + INSTRUCTION + "{{ question }}"})["advice"] == []


def test_what_people_read(documents: Any) -> None:
    done = CliRunner().invoke(commands, ["plan", str(documents.save(plan={"order": "input"}))])
    lines = dict(line.split(None, 1) for line in done.stdout.splitlines() if not line.startswith(" "))
    assert list(lines) == ["rows", "tokens", "equal", "groups", "cache", "time", "note"]
    assert lines["rows"] == "33: 31 prompts, 2 without (1 prompt_too_long, 1 template_undefined)"
    assert lines["equal"] == "1 rows take the answer of an equal prompt"
    assert lines["note"].startswith("plan.order is input")


def test_texts_of_the_data_do_nothing_to_a_terminal(job_folder: Any) -> None:
    job_folder.write("rows.jsonl", [{"doc": f"\x1b[2J\u202e{'x' * 40}{number}"} for number in range(4)])
    done = CliRunner().invoke(commands, ["plan", str(job_folder.save(prompt={"text": "{{ doc }}"}))])
    assert "4 rows share" in done.stdout
    assert all(char == "\n" or char.isprintable() for char in done.stdout)


def test_an_empty_table_has_a_plan(job_folder: Any) -> None:
    job_folder.write("rows.jsonl", "")
    found = plan(job_folder, "--machine", "h200", "--pilot", "2")
    assert (found["rows"], found["computed_tokens"], found["time"]) == (0, 0, None)


def test_a_plan_loads_no_torch(documents: Any) -> None:
    job = documents.save()
    code = f"""
import sys
from batchgen.cli import commands
from batchgen.forecast.estimate import REACHED
commands(["plan", {str(job)!r}], standalone_mode=False)
sys.exit("torch" in sys.modules)
"""
    subprocess.run([sys.executable, "-c", code], check=True, cwd=Path(job).parent, capture_output=True)
