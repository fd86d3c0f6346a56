"""The stages of the line. `ls stages/` reads in the order in which they run; `dvc.yaml` is the graph.

Environment settings that must be made before torch or a library with telemetry is imported are made here, once.
"""

import os

# Spinning OpenMP threads cost a factor of six as soon as anything else runs on the machine.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TRANSFORMERS_OFFLINE", "1")
os.environ.setdefault("DO_NOT_TRACK", "1")
os.environ.setdefault("GX_ANALYTICS_ENABLED", "false")
