"""Checkpoints that load anywhere: see ``docs/decisions/0007-checkpoints.md`` for the shape.

``save`` and ``load`` are the whole face, with ``latest`` to find what is good. Below them:
``state`` and ``contents`` say what there is, ``entries`` cuts it into boxes, ``data_file``,
``index`` and ``manifest`` are the files, ``folder`` publishes them, ``plan`` compares a checkpoint
with a model.
"""

from shardwise.checkpoint.background import PendingSave
from shardwise.checkpoint.export import export
from shardwise.checkpoint.folder import latest
from shardwise.checkpoint.load import load
from shardwise.checkpoint.save import save

__all__ = ["PendingSave", "export", "latest", "load", "save"]
