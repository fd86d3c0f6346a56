"""EAGLE-3, the draft algorithm of this name in params.yaml: the module, its files, its training.

The parts: _module.py (the layer, with a picture of what predicts what), _start.py (initial weights), _training.py
(training-time test over packed rows), _layout.py (whom it computes), _attention.py (in blocks), _products.py (in bfloat16), _loss.py, _gradients.py (of a
step, in pieces), _group.py (several processes), _trainer.py (optimizer), _session.py (a run), _read_ahead.py, _watch.py, _resume.py,
_curves.py, _board.py (for TensorBoard), _export.py (files), _formats.py (other tools' files), and _decode.py for serving.
"""

from stages.drafts._board import Board, demand_tensorboard
from stages.drafts._curves import Curves, HeldOut
from stages.drafts._export import DraftCheckpoint, check_vocabulary, config_json, export, read_draft
from stages.drafts._formats import FORMATS, Verifier, write_as
from stages.drafts._group import ALONE, Group, join, leave
from stages.drafts._loss import Teacher
from stages.drafts._module import Eagle3, Eagle3Config, rotary, rotate
from stages.drafts._resume import ResumePoints
from stages.drafts._session import Best, Rhythm, Session
from stages.drafts._start import carry_over, match_scales, start_draft
from stages.drafts._trainer import BatchOrder, Schedule, Trainer
from stages.drafts._training import Ahead, PackedBatch, look_ahead

__all__ = [
    "ALONE",
    "FORMATS",
    "Ahead",
    "BatchOrder",
    "Best",
    "Board",
    "Curves",
    "DraftCheckpoint",
    "Eagle3",
    "Eagle3Config",
    "Group",
    "HeldOut",
    "PackedBatch",
    "ResumePoints",
    "Rhythm",
    "Schedule",
    "Session",
    "Teacher",
    "Trainer",
    "Verifier",
    "carry_over",
    "check_vocabulary",
    "config_json",
    "demand_tensorboard",
    "export",
    "join",
    "leave",
    "look_ahead",
    "match_scales",
    "read_draft",
    "rotary",
    "rotate",
    "start_draft",
    "write_as",
]
