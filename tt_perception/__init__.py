# SPDX-License-Identifier: Apache-2.0
"""Perception models for ROS 2 and Autoware on Tenstorrent cards.

Importing this package imports neither torch, ttnn nor rclpy, and has no side effects.
"""

__version__ = '0.1.0'
__all__ = ['BEVFusion']


def __getattr__(name: str):
    if name == 'BEVFusion':
        from tt_perception.bevfusion.model import BEVFusion
        return BEVFusion
    raise AttributeError(f'module {__name__!r} has no attribute {name!r}')


def __dir__():
    return sorted([*globals(), *__all__])
