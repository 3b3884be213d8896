# SPDX-License-Identifier: Apache-2.0
"""The node with a model that says what it was given, and can be slow or fail; no network."""

from __future__ import annotations

import os
import sys
import time
from concurrent.futures import Future
from typing import Any

import numpy as np

from tt_perception.bevfusion.cloud import Cloud
from tt_perception.bevfusion.config import BEVFusionConfig
from tt_perception.bevfusion.detections import Detections3D
from tt_perception.ros.bevfusion import BEVFusionNode
from tt_perception.ros.process import run_node
from tt_perception.runtime.errors import ArtifactError, InputError


class FakeModel:
    """Answers with one object: its position is the ego's, its length the number of points.

    Its width is 2 when the call reset the stream, else 1; its height is the number of calls.

    :ivar meta: of the answers to come, with the keys that the node reads.
    """

    def __init__(self, config: BEVFusionConfig, delay_s: float = 0.0,
                 fail_at: int | None = None) -> None:
        self.config = config
        self.info = {'model': 'fake', 'source': 'nowhere', 'backend': 'cpu'}
        self.delay_s = delay_s
        self.fail_at = fail_at
        self.num_calls = 0
        self.num_resets = 0
        self.meta = {
            'num_points_dropped': 0, 'num_sweeps_skipped': 0, 'num_voxels_clipped': 0,
            'is_num_voxels_within_range': True,
            'postprocess': {'proposals': 500, 'non_finite': 0, 'unknown_class': 0}}
        self.is_closed = False

    def warmup(self) -> None:
        """Do nothing."""

    def submit(self, cloud: Cloud, *, stream: Any, **per_call: Any) -> Future[Detections3D]:
        """Answer at once."""
        result: Future[Detections3D] = Future()
        result.set_result(self(cloud, stream=stream, **per_call))
        return result

    def __call__(self, cloud: Cloud, *, stream: Any, **per_call: Any) -> Detections3D:
        assert not self.is_closed
        points = cloud.points
        self.num_calls += 1
        if self.num_calls == self.fail_at:
            raise RuntimeError('injected fault')
        time.sleep(self.delay_s)
        pose = stream['T_world_from_ego']
        if pose is None and self.config.densification.num_past_frames:
            raise InputError('stream: no pose', reason='no_transform')
        position = pose[:3, 3] if pose is not None else (0, 0, 0)
        score = per_call.get('iou_nms_threshold', 0.5)
        box = [*position, len(points), 2 if stream['reset'] else 1, self.num_calls, 0.25]
        return Detections3D(
            np.array([box], np.float32), np.zeros((1, 2), np.float32),
            np.array([score], np.float32), np.array([1], np.uint8), np.array([1], np.uint8),
            np.array([0]), self.meta)

    def reset_stream(self, stream_id: str | None = None) -> None:
        """Count the call."""
        self.num_resets += 1

    def close(self) -> None:
        """Close the model."""
        self.is_closed = True


class FakeNode(BEVFusionNode):
    """The node with :class:`FakeModel`, driven by the variables ``FAKE_...``."""

    def create_model(self) -> FakeModel:
        """Take ``FAKE_LOAD_S`` seconds."""
        path = self._settings.value('model_path')
        if path and not os.path.exists(path):
            raise ArtifactError(f'{path}: no such file or folder')
        given = self._settings.given()
        values = {name: value for name, value in given.items()
                  if name.startswith(('densification', 'voxel_size', 'class_names'))}
        self.get_logger().info('loading')
        time.sleep(float(os.environ.get('FAKE_LOAD_S', 0)))
        fail_at = os.environ.get('FAKE_FAIL_AT')
        return FakeModel(BEVFusionConfig.from_parameters(values),
                         float(os.environ.get('FAKE_DELAY_S', 0)),
                         int(fail_at) if fail_at else None)


def main() -> int:
    """Run the node."""
    return run_node('fake_bevfusion:FakeNode')


if __name__ == '__main__':
    sys.exit(main())
