"""``--ranks N``: start N copies of the command on this machine with torchrun's own launcher.

torchrun does the same and works too. In here the command is checked once before any process starts,
and Ctrl-C and a failed rank end in an exit code instead of the launcher's traceback.
"""

from __future__ import annotations

import logging
import os
import sys
import uuid
from typing import TYPE_CHECKING, Final

from torch.distributed.elastic.multiprocessing import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from shardwise.cli.train.interrupt import LAUNCHER, exit_code
from shardwise.cli.train.ranks import num_cores

if TYPE_CHECKING:
    from collections.abc import Sequence

_LAUNCHER_LOGGERS: Final = (
    "torch.distributed.elastic.agent.server.api",
    "torch.distributed.elastic.multiprocessing.api",
)

SHUTDOWN_S: Final = 120
"""How long the ranks may take to finish a step, save and report when asked to stop."""


def launch(arguments: Sequence[str], *, num_ranks: int) -> int:
    """Run ``python -m shardwise.cli`` with these arguments once per rank, and wait.

    Returns:
        0, the exit code of the first rank that failed, 130 after Ctrl-C, or 143 after SIGTERM.
    """
    for name in _LAUNCHER_LOGGERS:  # they announce every signal and exit code that we return
        logging.getLogger(name).setLevel(logging.CRITICAL)
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, num_cores() // num_ranks)))
    run_id = uuid.uuid4().hex
    os.environ[LAUNCHER] = f"{os.getpid()} {run_id}"
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=num_ranks,
        run_id=run_id,
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
        max_restarts=0,
        monitor_interval=0.1,
        shutdown_timeout=SHUTDOWN_S,
    )
    try:
        elastic_launch(config, sys.executable)("-m", "shardwise.cli", *arguments)
    except SignalException as error:
        return exit_code(error.sigval)
    except ChildFailedError as error:
        rank, failure = error.get_first_failure()
        if failure.exitcode < 0:  # it could not speak for itself
            sys.stderr.write(
                f"shardwise train: rank {rank} was ended by {failure.signal_name()}; with "
                "--checkpoint-dir the same command goes on after the newest checkpoint\n"
            )
        return failure.exitcode if failure.exitcode > 0 else 1
    return 0
