# SPDX-License-Identifier: Apache-2.0
"""What a node says on ``/diagnostics``, and how often it repeats itself in its log."""

from __future__ import annotations

import time
from collections.abc import Mapping
from enum import IntEnum
from typing import Any

from tt_perception.ros.mailbox import FrameCounts


class Level(IntEnum):
    """Levels of ``diagnostic_msgs/msg/DiagnosticStatus``."""

    OK = 0
    WARN = 1
    ERROR = 2


class Throttle:
    """Says whether a message of some kind may be logged again; each kind has its own time."""

    def __init__(self, period_s: float) -> None:
        self._period_s = period_s
        self._last_s: dict[str, float] = {}

    def ready(self, kind: str) -> bool:
        """Return True at most once in a period for each kind."""
        now_s = time.monotonic()
        if now_s - self._last_s.get(kind, -self._period_s) < self._period_s:
            return False
        self._last_s[kind] = now_s
        return True


def frame_values(counts: FrameCounts) -> dict[str, Any]:
    """Return key -> value of the status about frames."""
    values = {
        'received': counts.received,
        'answered': counts.answered,
        'replaced': counts.replaced,
        'discarded': counts.discarded,
        'failed': counts.failed,
        'in_progress': counts.in_progress,
    }
    values.update({f'refused.{reason}': n for reason, n in sorted(counts.refused.items())})
    return values


def frame_report(now: FrameCounts, before: FrameCounts) -> str:
    """Return one line about the frames between two moments."""
    parts = [f'{name} {getattr(now, name) - getattr(before, name)}'
             for name in ('received', 'answered', 'replaced')]
    parts += [f'{name} {difference}' for name in ('discarded', 'failed')
              if (difference := getattr(now, name) - getattr(before, name))]
    parts += [f'refused ({reason}) {difference}' for reason, n in sorted(now.refused.items())
              if (difference := n - before.refused.get(reason, 0))]
    answered = now.answered - before.answered
    if answered:
        parts.append(f'mean {(now.total_ms - before.total_ms) / answered:.0f} ms')
    return 'frames: ' + ', '.join(parts)


class DiagnosticsPublisher:
    """Publishes on ``/diagnostics``; safe from several threads."""

    def __init__(self, node: Any) -> None:
        from diagnostic_msgs.msg import DiagnosticArray
        self._name = node.get_name()
        self._publisher = node.create_publisher(DiagnosticArray, '/diagnostics', 10)

    def publish(self, stamp: Any, task: str, level: Level, message: str,
                values: Mapping[str, Any]) -> None:
        """Publish one status.

        :param stamp: ``builtin_interfaces/msg/Time``.
        :param task: what the status is about; the node's name is put before it.
        :param values: written as text, truth values as ``True`` and ``False``.
        """
        from diagnostic_msgs.msg import DiagnosticArray, DiagnosticStatus, KeyValue
        status = DiagnosticStatus(
            level=bytes([level]), name=f'{self._name}: {task}', message=message,
            hardware_id=self._name,
            values=[KeyValue(key=key, value=str(value)) for key, value in values.items()])
        array = DiagnosticArray(status=[status])
        array.header.stamp = stamp
        self._publisher.publish(array)
