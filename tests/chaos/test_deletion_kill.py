"""kill -9 of a process that deletes its topic and creates it again, at any moment."""

from __future__ import annotations

import itertools
import random
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from forebay.topic.store import Store
from support.deleting_process import TOPIC, settings
from support.paths import TESTS
from support.topic_evidence import read_all


@dataclass
class Known:
    """What the processes said so far."""

    messages: dict[int, int] = field(default_factory=dict)
    """The acknowledged messages of the topic that is there now: their numbers by offset."""
    used: int = 0
    """One more than the highest offset of any topic of this name."""
    first: int = 0
    """Messages with a lower number are in deleted topics."""
    last: int = 0
    doubtful: bool = False
    """Whether a deletion was begun, and nobody knows whether it took place."""

    def hear(self, line: str) -> None:
        words = line.split()
        if words[0] == "made":
            offset, number = int(words[1]), int(words[2])
            assert offset >= self.used, "an old offset"
            self.messages[offset] = number
            self.used, self.last = offset + 1, number
        elif words[0] == "deleting":
            self.doubtful = True
        else:
            assert int(words[1]) >= self.used
            self.forget()

    def forget(self) -> None:
        self.messages, self.first, self.doubtful = {}, self.last + 1, False

    def compare(self, found: dict[int, int]) -> None:
        if self.doubtful and not found:
            self.forget()
        self.doubtful = False
        assert self.messages.items() <= found.items(), "an acknowledged message is lost"
        assert all(number >= self.first for number in found.values()), "an old message"
        # The last append may have got no response.
        self.used = max([self.used, *(offset + 1 for offset in found)])
        self.messages = found


def kill_again_and_again(data: Path, seed: int, times: int) -> None:
    rng, known = random.Random(seed), Known()
    for _ in range(times):
        command = [sys.executable, "-m", "support.deleting_process", str(data)]
        process = subprocess.Popen(
            [*command, str(known.last + 2)], cwd=TESTS, stdout=subprocess.PIPE, text=True
        )
        assert process.stdout is not None
        lines = rng.randint(1, 40)
        said = list(itertools.islice(process.stdout, lines))
        time.sleep(rng.random() * 0.03)  # the moment of the kill is what is random here
        process.kill()
        said += process.stdout.readlines()
        process.wait()
        process.stdout.close()
        for line in said:
            if line.endswith("\n"):
                known.hear(line)
        check(data, known)


def check(data: Path, known: Known) -> None:
    with Store(settings(data)) as store:
        there = TOPIC in store.topics()
        found = read_all(store.topic(TOPIC))
        assert found.lost == []
        numbers = {at: int(each.split()[0]) for at, each in found.messages.items()}
        assert there or not numbers, "a deleted topic has messages"
        known.compare(numbers)
        assert store.topic(TOPIC).append(b"%d " % (known.last + 1)) >= known.used
        store.topic(TOPIC).flush()
        known.hear(f"made {store.topic(TOPIC).watermarks().appended - 1} {known.last + 1}")


@pytest.mark.timeout(300)
@pytest.mark.parametrize("seed", range(2))
def test_a_kill_during_deletions_shows_no_old_message_and_no_old_offset(
    tmp_path: Path, seed: int
) -> None:
    kill_again_and_again(tmp_path, seed, times=4)


@pytest.mark.soak
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("seed", range(20))
def test_many_kills_during_deletions_show_no_old_message_and_no_old_offset(
    tmp_path: Path, seed: int
) -> None:
    kill_again_and_again(tmp_path, 1000 + seed, times=50)
