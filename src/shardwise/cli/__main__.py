"""``python -m shardwise.cli`` is the ``shardwise`` command."""

from __future__ import annotations

from shardwise.cli.main import app

if __name__ == "__main__":
    app(prog_name="shardwise")
