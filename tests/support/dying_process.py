"""A process that uploads some messages, syncs some more, and dies with status 7.

Run as a script; its argument is JSON, the parts of the store's settings and the two counts.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

from forebay.settings import CloudSettings, MetadataSettings
from support.tiers import NAME, TierSettings, produce


def main(given: dict[str, Any]) -> None:
    tiers = TierSettings(
        Path(given["data"]), CloudSettings(**given["cloud"]), MetadataSettings(**given["metadata"])
    )
    topic = tiers.open().topic(NAME)
    produce(topic, given["uploaded"])
    topic.upload()
    produce(topic, given["synced"])
    topic.flush()
    os._exit(7)


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
