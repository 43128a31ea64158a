"""A store that was opened before a fork is the parent's: the child gets an error, not a hang."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import forebay

_FORK = """
import os, signal, sys, forebay
from forebay.errors import LogClosed
store = forebay.open(sys.argv[1])
topic = store.topic("t")
topic.append(b"before", durability="uploaded")
child = os.fork()
if child == 0:
    signal.alarm(80)
    for use in (
        lambda: store.topic("t"),
        lambda: store.topic("new").append(b"from the child", durability="synced"),
        lambda: store.topics(),
        lambda: topic.append(b"from the child", durability="uploaded"),
        lambda: topic.upload(),
    ):
        try:
            use()
        except LogClosed:
            print("refused", flush=True)
    store.close()
    with forebay.open(sys.argv[1] + "/own") as own:
        print(own.topic("t").append(b"of the child", durability="uploaded"), flush=True)
    sys.exit(0)
assert os.waitpid(child, 0)[1] == 0
topic.append(b"after", durability="uploaded")
store.close()
"""


def test_a_forked_child_is_refused_whatever_it_asks_of_its_parents_store(tmp_path: Path) -> None:
    shown = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", _FORK, str(tmp_path)],
        check=True,
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert shown.stdout.split() == ["refused"] * 5 + ["0"]
    with forebay.open(tmp_path) as store:
        assert [message.payload for message in store.topic("t").read()] == [b"before", b"after"]
        assert store.topics() == ["/default/t"]
