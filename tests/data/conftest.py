"""A real S3 server, and a proxy in front of it that throttles, cuts and refuses on command."""

import asyncio
import os
import signal
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType
from typing import Any

import fsspec
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from aiohttp import ClientSession, web
from botocore.retries.standard import ExponentialBackoff
from yarl import URL

from batchgen.data import storage
from batchgen.data.manifest import Manifest, SourceRecord
from batchgen.data.output import OutputFolder
from batchgen.data.rows import OutputRow

ROOT = Path(__file__).resolve().parents[2]


def load_script(name: str) -> ModuleType:
    spec = spec_from_file_location(name, ROOT / "scripts" / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="session")
def seaweed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Endpoint of an S3 server."""
    with load_script("seaweed").serve(tmp_path_factory.mktemp("seaweed")) as endpoint:
        yield endpoint


@dataclass
class Fault:
    """What happens to the next `times` requests that match: see `FaultProxy.handle`."""

    kind: str
    times: int = 1
    method: str = ""
    path: str = ""

    def matches(self, request: web.Request) -> bool:
        return self.times > 0 and self.method in ("", request.method) and self.path in request.raw_path


@dataclass
class FaultProxy:
    """Passes requests on to the server, headers untouched since they are signed."""

    server: str
    faults: list[Fault] = field(default_factory=list)
    seen: list[str] = field(default_factory=list)
    endpoint: str = ""

    def add(self, kind: str, times: int = 1, method: str = "", path: str = "") -> Fault:
        self.faults.append(Fault(kind, times, method, path))
        return self.faults[-1]

    async def handle(self, request: web.Request) -> web.StreamResponse:
        self.seen.append(f"{request.method} {request.raw_path}")
        await request.read()
        fault = next((fault for fault in self.faults if fault.matches(request)), None)
        if fault is None:
            return await self.forward(request)
        fault.times -= 1
        match fault.kind:
            case "SIGTERM":  # comes while the request is on its way
                os.kill(os.getpid(), signal.SIGTERM)
                return await self.forward(request)
            case "reset":
                return self.cut(request)
            case "lost":  # done, but nobody hears of it
                await self.forward(request)
                return self.cut(request)
            case "truncated":
                answer = await self.forward(request)
                assert isinstance(answer, web.Response)
                assert isinstance(answer.body, bytes)
                half = web.StreamResponse(status=answer.status, headers=answer.headers)
                half.content_length = len(answer.body)
                await half.prepare(request)
                await half.write(answer.body[: len(answer.body) // 2])
                return self.cut(request)
            case code:
                status = {"SlowDown": 503, "InternalError": 500}.get(code, 403)
                xml = f"<Error><Code>{code}</Code><Message>as arranged</Message></Error>"
                return web.Response(status=status, text=xml, content_type="application/xml")

    def cut(self, request: web.Request) -> web.StreamResponse:
        assert request.transport is not None
        request.transport.abort()
        return web.Response()

    async def forward(self, request: web.Request) -> web.StreamResponse:
        headers = {name: value for name, value in request.headers.items() if name != "Expect"}
        url, body = URL(self.server + request.raw_path, encoded=True), await request.read()
        async with (
            ClientSession(auto_decompress=False) as session,
            session.request(request.method, url, headers=headers, data=body) as answer,
        ):
            if request.method == "HEAD":  # the length is that of a body that does not come
                head = web.StreamResponse(status=answer.status, headers=answer.headers)
                await head.prepare(request)
                return head
            content = await answer.read()
            headers = {k: v for k, v in answer.headers.items() if k not in ("Transfer-Encoding", "Content-Length")}
            return web.Response(status=answer.status, headers=headers, body=content)


@pytest.fixture(scope="session")
def proxy_server(seaweed: str) -> Iterator[FaultProxy]:
    """The proxy, in a thread."""
    proxy = FaultProxy(seaweed)
    loop = asyncio.new_event_loop()
    ready = threading.Event()

    async def run() -> None:
        application = web.Application(client_max_size=2**30)
        application.router.add_route("*", "/{path:.*}", proxy.handle)
        runner = web.AppRunner(application)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        assert site._server is not None
        proxy.endpoint = f"http://127.0.0.1:{site._server.sockets[0].getsockname()[1]}"  # type: ignore[attr-defined]
        ready.set()

    def serve() -> None:
        loop.run_until_complete(run())
        loop.run_forever()

    thread = threading.Thread(target=serve, daemon=True)
    thread.start()
    assert ready.wait(20)
    yield proxy
    loop.call_soon_threadsafe(loop.stop)
    thread.join()


@pytest.fixture
def s3(seaweed: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., str]]:
    """Gives URLs in a folder of the bucket; the environment leads to the server."""
    yield from _reached(seaweed, monkeypatch)


@pytest.fixture
def faulty_s3(proxy_server: FaultProxy, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Any]:
    """The same through the proxy, with waits that a test can afford. `faulty_s3.proxy` takes faults."""
    monkeypatch.setenv("BATCHGEN_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(ExponentialBackoff, "delay_amount", lambda self, context: 0.001)
    proxy_server.faults.clear()
    proxy_server.seen.clear()
    for urls in _reached(proxy_server.endpoint, monkeypatch):
        urls.proxy = proxy_server  # type: ignore[attr-defined]
        yield urls
    proxy_server.faults.clear()


def _reached(endpoint: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., str]]:
    script = load_script("seaweed")
    for name, value in script.environment(endpoint).items():
        monkeypatch.setenv(name, value)
    storage.configure(endpoint=None, region=None, profile=None, anonymous=False)
    fsspec.get_filesystem_class("s3").clear_instance_cache()
    _reached.count += 1  # type: ignore[attr-defined]
    base = f"s3://{script.BUCKET}/test-{_reached.count}"  # type: ignore[attr-defined]
    yield lambda *names: "/".join([base, *names])
    fsspec.get_filesystem_class("s3").clear_instance_cache()


_reached.count = 0  # type: ignore[attr-defined]


class S3Job:
    """A job of rows with known answers, without a model."""

    def open(self, url: str, num_rows: int = 12) -> OutputFolder:
        """The output folder, with parts of 4 rows."""
        model = SourceRecord(name="model", fingerprint="f0")
        manifest = Manifest(
            batchgen_version="0.1.0",
            spec={},
            fingerprint={},
            inputs=(),
            model=model,
            tokenizer=model,
            num_rows=num_rows,
            n=1,
            part_rows=4,
        )
        return OutputFolder.open(url, manifest=manifest, carried=pa.schema([]), checkpoint_s=1000)

    def fill(self, folder: OutputFolder, stop: int | None = None) -> None:
        """Add pending rows, with a checkpoint after each."""
        for row in [row for rows in folder.pending() for row in rows][:stop]:
            folder.add(OutputRow(row, 0, "ok", output=f"answer {row}"))
            folder.checkpoint()

    def outputs(self, url: str) -> list[str]:
        """The answers in all parts."""
        fs, path = storage.filesystem(url)
        parts = sorted(file.path for file in storage.list_files(fs, path) if file.path.endswith(".parquet"))
        return [text for part in parts for text in pq.read_table(part, filesystem=fs)["output"].to_pylist()]

    def right(self, num_rows: int = 12) -> list[str]:
        """What they have to be."""
        return [f"answer {row}" for row in range(num_rows)]


@pytest.fixture
def s3_job() -> S3Job:
    """A job of rows with known answers, without a model."""
    return S3Job()
