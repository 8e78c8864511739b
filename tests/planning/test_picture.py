"""The picture of a plan in the documentation is that of a real one."""

import json
import re
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
ROWS = [("ferry", "Who"), ("library", "Who"), ("ferry", "What"), ("library", "When"), ("ferry", "When")]
ROWS += [("library", "What"), ("ferry", "Who"), ("storm", "Who")]


def test_the_picture_is_a_plan(smollm2: Path, job_folder: Any) -> None:
    """Every number and every row of it, as a run reports them."""
    page = (ROOT / "docs" / "planning.md").read_text()
    picture = page[page.index("## A real plan") : page.index("## What it does")]
    texts = [json.loads(line)["text"] for line in (ROOT / "jobs/data/articles.jsonl").read_text().splitlines()]
    questions = {question.split()[0]: question for question in re.findall(r'"([^"]*\?)"', picture)}
    assert all(f'"{text[:20]}' in picture for text in texts[:3])
    job_folder.write(
        "rows.jsonl",
        [{"text": next(t for t in texts if word in t), "question": questions[asked]} for word, asked in ROWS],
    )
    done = job_folder.run(
        model=str(smollm2),
        prompt={
            "system": "You answer questions about texts.",
            "user": "Text: {{ text }}\n\nQuestion: {{ question }}",
        },
        generate={"max_tokens": 1},
        engine={"page_size": 16, "max_length": 128},
    )
    assert done.exit_code == 0, done.log
    counts = {row["row"]: (row["prompt_tokens"], row["cached_tokens"]) for row in done.rows}
    drawn = re.findall(r"row (\d)(?:, answers row (\d) too)?.*?(\d+) +(\d+) +(\d+)$", picture, re.MULTILINE)
    assert len(drawn) == 7
    for row, answered, tokens, reused, computed in drawn:
        assert counts.pop(int(row)) == (int(tokens), int(reused))
        assert int(computed) == int(tokens) - int(reused)
        if answered:
            assert counts.pop(int(answered)) == (int(tokens), int(tokens))
    assert not counts
    report = json.loads((job_folder.out / "manifest.json").read_text())["report"]
    assert f"{report['prompt_tokens']} prompt tokens. {report['computed_tokens']} are computed" in picture
