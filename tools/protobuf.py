"""Compiles the .proto files of the broker: `make protobuf`.

The generated modules are changed in two ways. Their check of the runtime's version is removed: the
descriptors load under protobuf 5.29 and all later versions. And they have a pool of descriptors of
their own, so that a program can import Danube's client, which has messages of the same names, too.
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

FILES = tuple(f"src/forebay/broker/{name}.proto" for name in ("danube", "schemas", "streams"))
HEAD = "# mypy: ignore-errors\n"
STUB_HEAD = "# mypy: disable-error-code=type-arg\n"


def main() -> None:
    for file in FILES:
        command = ["-m", "grpc_tools.protoc", "-Isrc", "--python_out=src", "--pyi_out=src", file]
        subprocess.run([sys.executable, *command], check=True)  # noqa: S603
        module = Path(file.replace(".proto", "_pb2.py"))
        text = module.read_text(encoding="utf-8")
        text = re.sub(r"from google.protobuf import runtime_version.*\n", "", text)
        text = re.sub(r"_runtime_version\.Validate\w+\((?:\n.*)*?\n\)\n", "", text)
        text = text.replace("_descriptor_pool.Default()", "_descriptor_pool.DescriptorPool()")
        module.write_text(HEAD + text, encoding="utf-8")
        stub = module.with_suffix(".pyi")
        stub.write_text(STUB_HEAD + stub.read_text(encoding="utf-8"), encoding="utf-8")


if __name__ == "__main__":
    main()
