"""The parts load as they are with the libraries that people use."""

from pathlib import Path

import pyarrow as pa
import pytest

from batchgen.data.columns import Asked
from batchgen.data.manifest import Manifest, SourceRecord
from batchgen.data.output import OutputFolder
from batchgen.data.rows import OutputRow
from batchgen.errors import RowError

TOKEN = {"token_id": 5, "token": " yes", "logprob": -0.5}
CARRIED = pa.schema([("id", pa.int64()), ("tags", pa.list_(pa.string())), ("nothing", pa.null())])


@pytest.fixture
def parts(tmp_path: Path) -> str:
    """Pattern of the parts of a job with every optional column; all rows of its first part are bad."""
    write_parts(tmp_path, as_json=False)
    return str(tmp_path / "part-*.parquet")


def write_parts(folder_path: Path, *, as_json: bool) -> None:
    model = SourceRecord(name="m", fingerprint="f")
    manifest = Manifest(
        batchgen_version="0.1.0",
        spec={},
        fingerprint={},
        inputs=(),
        model=model,
        tokenizer=model,
        num_rows=4,
        n=1,
        part_rows=2,
        part_format="jsonl" if as_json else "parquet",
        part_compression="gzip" if as_json else "zstd",
    )
    folder = OutputFolder.open(
        str(folder_path),
        manifest=manifest,
        carried=CARRIED,
        asked=Asked(logprobs=True, labels=("no", "yes", "not sure: 'x'.y"), as_json=as_json),
    )
    with folder:
        for row in range(2):
            folder.add(OutputRow(row, 0, "error", error=RowError("bad_json", "line")))
        for row in range(2, 4):
            folder.add(
                OutputRow(
                    row,
                    0,
                    "ok",
                    output="yes é",
                    finish_reason="eos",
                    carried={"id": row, "tags": ["a", "b"]},
                    logprobs=[{**TOKEN, "top": [TOKEN]}],
                    label="yes",
                    label_probs={"no": 0.25, "yes": 0.5, "not sure: 'x'.y": 0.25},
                )
            )
        folder.finish()


def test_pandas(parts: str) -> None:
    pandas = pytest.importorskip("pandas")
    frames = [pandas.read_parquet(path) for path in sorted(Path(parts).parent.glob("part-*"))]
    ours = [name for name in frames[0].columns if name not in CARRIED.names]
    assert (frames[0].dtypes[ours] == frames[1].dtypes[ours]).all()
    frame = pandas.concat(frames)
    assert frame["row"].tolist() == [0, 1, 2, 3]
    assert frame["status"].tolist() == ["error", "error", "ok", "ok"]
    assert frame["label_probs"].iloc[3]["yes"] == 0.5
    assert frame["error"].iloc[0] == {"kind": "bad_json", "message": "line"}


def test_datasets(parts: str, tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    loaded = datasets.load_dataset("parquet", data_files=parts, cache_dir=str(tmp_path / "cache"), split="train")
    assert loaded["row"][:] == [0, 1, 2, 3]
    assert loaded[3]["label_probs"]["yes"] == 0.5
    assert loaded[3]["logprobs"] == [{**TOKEN, "top": [TOKEN]}]
    assert loaded[0]["output"] is None


def test_duckdb(parts: str) -> None:
    duckdb = pytest.importorskip("duckdb")
    query = f"select row, status, error.kind, label_probs.yes, logprobs[1].top[1].token from '{parts}' order by row"
    assert duckdb.sql(query).fetchall() == [
        (0, "error", "bad_json", None, None),
        (1, "error", "bad_json", None, None),
        (2, "ok", None, 0.5, " yes"),
        (3, "ok", None, 0.5, " yes"),
    ]


def test_polars(parts: str) -> None:
    polars = pytest.importorskip("polars")
    frame = polars.read_parquet(parts)
    assert frame["row"].to_list() == [0, 1, 2, 3]
    assert frame["label_probs"].struct.field("yes").to_list() == [None, None, 0.5, 0.5]
    assert frame["nothing"].dtype == polars.String


def test_a_folder_of_parts_reads_as_one_dataset(parts: str) -> None:
    dataset = pytest.importorskip("pyarrow.dataset")
    table = dataset.dataset(sorted(map(str, Path(parts).parent.glob("part-*")))).to_table()
    assert table["id"].to_pylist() == [None, None, 2, 3]


def test_lines_of_json(tmp_path: Path) -> None:
    pandas, duckdb = pytest.importorskip("pandas"), pytest.importorskip("duckdb")
    write_parts(tmp_path, as_json=True)
    files = sorted(tmp_path.glob("part-*.jsonl.gz"))
    frame = pandas.concat(pandas.read_json(path, lines=True) for path in files)
    assert frame["row"].tolist() == [0, 1, 2, 3]
    assert frame["error"].iloc[0] == {"kind": "bad_json", "message": "line"}
    query = f"select row, error.kind, label_probs.yes, logprobs[1].top[1].token from read_json('{tmp_path}/part-*')"
    assert duckdb.sql(f"{query} order by row").fetchall()[1:3] == [(1, "bad_json", None, None), (2, None, 0.5, " yes")]
