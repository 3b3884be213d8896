# SPDX-License-Identifier: Apache-2.0
"""A managed node whose ``configure`` takes ``FAKE_LOAD_S`` seconds of one call."""

from __future__ import annotations

import os
import time

from tt_perception.ros.lifecycle import ManagedNode
from tt_perception.ros.process import run_node


class SlowNode(ManagedNode):
    """Does nothing, slowly."""

    def __init__(self, **kwargs) -> None:
        super().__init__('slow', **kwargs)

    def configure(self) -> None:
        """Sleep on the thread for long work."""
        self.get_logger().info('loading')
        self.run_stoppable(lambda: time.sleep(float(os.environ.get('FAKE_LOAD_S', 0))))

    def activate(self) -> None:
        """Say so."""
        self.get_logger().info('working')


def main() -> int:
    """Run the node."""
    return run_node('slow_node:SlowNode')
