"""Run when the image is built: the plug-in is found by its entry point, its hook is in place, and it refuses what it must."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path


def main() -> None:
    import sglang
    from sglang.srt.plugins import load_plugins
    from sglang.srt.server_args import ServerArgs

    from draftline_sglang_guard import RECORD, VERSION, faults_of

    load_plugins()
    if not hasattr(ServerArgs.check_server_args, "__wrapped__"):
        raise SystemExit("the plug-in's hook is not in place: SGLang did not find it, or its name changed")
    if sglang.__version__.split("+")[0] != VERSION:
        raise SystemExit(f"this image has SGLang {sglang.__version__}, and the plug-in is for {VERSION}")
    with tempfile.TemporaryDirectory() as folder:
        record = {"weights_digest": "none", "config_digest": "none", "capture": {"compute_dtype": "bfloat16"}}
        (Path(folder) / RECORD).write_text(json.dumps(record))
        faults = faults_of({"speculative_algorithm": "EAGLE"}, Path(folder), sglang.__version__)
    if not any("inert" in fault for fault in faults):
        raise SystemExit(f"the plug-in let an inert draft through: {faults}")
    print(f"draftline guard is in place in SGLang {sglang.__version__}")


if __name__ == "__main__":
    main()
