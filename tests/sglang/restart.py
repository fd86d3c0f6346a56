"""What an operator's restart command does: the server before is ended with all its processes, the next one is on its way with
the draft in $DRAFTLINE_DRAFT when this returns.

    python restart.py SPEC    a JSON file: command (@DRAFT@ for the draft's folder), env, log, pid
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path


def stop(pid_file: Path) -> None:
    """End the process group that was started last, and wait until none of it is left."""
    if not pid_file.exists():
        return
    group = int(pid_file.read_text())
    with suppress(ProcessLookupError):
        os.killpg(group, signal.SIGKILL)
    while left(group):
        time.sleep(0.1)


def left(group: int) -> list[int]:
    """Living processes of the group."""
    found: list[int] = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            state, _, of = stat.read_text().rpartition(")")[2].split()[:3]
            if int(of) == group and state != "Z":
                found.append(int(stat.parent.name))
    return found


def main() -> None:
    told = json.loads(Path(sys.argv[1]).read_text())
    stop(Path(told["pid"]))
    command = [word.replace("@DRAFT@", os.environ["DRAFTLINE_DRAFT"]) for word in told["command"]]
    with Path(told["log"]).open("ab") as log:
        child = subprocess.Popen(command, env=told["env"], stdout=log, stderr=log, start_new_session=True)
    Path(told["pid"]).write_text(str(child.pid))


if __name__ == "__main__":
    main()
