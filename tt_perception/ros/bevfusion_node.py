# SPDX-License-Identifier: Apache-2.0
"""The executable ``bevfusion_node``."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from tt_perception.ros.process import run_node


def main(args: Sequence[str] | None = None) -> int:
    """Run :class:`tt_perception.ros.bevfusion.BEVFusionNode` until SIGINT or SIGTERM.

    :param args: command line with ``--ros-args``, by default that of the process.
    :returns: exit code.
    """
    return run_node('tt_perception.ros.bevfusion:BEVFusionNode', args)


if __name__ == '__main__':
    sys.exit(main())
