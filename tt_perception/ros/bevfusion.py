# SPDX-License-Identifier: Apache-2.0
"""The node ``bevfusion``: ``PointCloud2`` and TF in, ``DetectedObjects`` out."""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping
from concurrent.futures import Future
from typing import Any

import numpy as np
from rclpy.clock import JumpThreshold
from rclpy.duration import Duration
from rclpy.qos import QoSProfile, ReliabilityPolicy
from rclpy.qos_overriding_options import QoSOverridingOptions

from tt_perception.bevfusion.cloud import decode_cloud
from tt_perception.bevfusion.config import PARAMETERS, score_parameter
from tt_perception.bevfusion.detections import Detections3D
from tt_perception.ros.conversions import DetectedObjectsWriter, stamp_to_ns
from tt_perception.ros.diagnostics import Level
from tt_perception.ros.frames import FrameNode
from tt_perception.ros.parameters import (
    BEVFUSION_NODE_PARAMETERS,
    BEVFUSION_UNUSED,
    NodeParameters,
    source_of,
)
from tt_perception.ros.tf import TransformError, Transforms, create_transforms
from tt_perception.runtime.errors import ConfigError, PerceptionError

INPUT = '~/input/pointcloud'
OUTPUT = '~/output/objects'

_IMAGE_BACKBONE = ('image_backbone_onnx_path', 'image_backbone_engine_path',
                   'image_backbone_trt_precision')


class BEVFusionNode(FrameNode):
    """Autoware's lidar detector as a managed node.

    Clouds arrive on the executor's thread; one worker thread decodes the newest, looks its
    transform up, runs the model and publishes. A cloud that is refused leaves no trace in the
    sweep cache, and the node stays active.
    """

    def __init__(self, **kwargs: Any) -> None:
        """See :class:`tt_perception.ros.lifecycle.ManagedNode`."""
        super().__init__('bevfusion', **kwargs)
        self._settings = NodeParameters(self, lambda: self.is_configured, self._change)
        self._settings.declare(BEVFUSION_NODE_PARAMETERS)
        self._settings.declare(PARAMETERS.values())
        self._settings.declare_unused(BEVFUSION_UNUSED)
        self._declare_scores(self._class_names())
        self._model: Any = None
        self._per_call: dict[str, Any] = {}
        self._transforms: Transforms | None = None
        self._transform_arrived = threading.Event()
        self._world_frame = ''
        self._time_jump: Any = None
        self._num_jumps = 0  # written by the executor's thread
        self._num_jumps_seen = 0  # written by the worker's thread
        self._writer: DetectedObjectsWriter | None = None
        self._publisher: Any = None
        self._subscription: Any = None
        self._points: np.ndarray | None = None

    def create_model(self) -> Any:
        """Load the model, on a thread that nothing of ROS waits for."""
        from tt_perception.bevfusion.model import BEVFusion
        source = source_of(*(self._settings.value(n) for n in ('model_path', 'onnx_path')))
        given = {name: value for name, value in self._settings.given().items()
                 if name in PARAMETERS}
        options = {name: self._settings.value(name) for name in (
            'backend', 'device_id', 'dispatch', 'timeout_s', 'pipeline')}
        return BEVFusion.from_pretrained(source, is_cancelled=self._stop.is_set, **options,
                                         **given)

    def configure(self) -> None:
        """Check the parameters, load and warm up the model, listen to TF, create the publisher.

        :raises PerceptionError: beginning with the name of the parameter or file at fault.
        """
        start_s = time.monotonic()
        self._settings.given()
        self._check_lidar_only()
        self._writer = _objects_writer()
        # Transforms that arrive while the model is loaded wait in the subscriptions.
        self._transforms = create_transforms(self, self._transform_arrived.set, self._warn_tf)
        self._model = self.run_stoppable(self._load)
        config = self._model.config
        self._world_frame = config.densification.world_frame_id
        if config.densification.num_past_frames == 0:
            self._close_transforms()
        self._show_parameters(config)
        self._time_jump = self.get_clock().create_jump_callback(
            JumpThreshold(min_forward=None, min_backward=Duration(nanoseconds=-1)),
            post_callback=self._on_time_jump)
        from autoware_perception_msgs.msg import DetectedObjects
        self._publisher = self.create_lifecycle_publisher(DetectedObjects, OUTPUT, 1)
        info = self._model.info
        self.get_logger().info(
            f'configured in {time.monotonic() - start_s:.1f} s: {info["model"]} from '
            f'{info["source"]}, backend {info["backend"]}, {len(self._settings.given())} '
            'parameters given')
        if self._settings.value('build_only'):
            self.get_logger().info('build_only: the model is prepared, the process ends')
            self.request_stop()

    def activate(self) -> None:
        """Subscribe, and start the worker."""
        from sensor_msgs.msg import PointCloud2
        self.start_frames(most_in_flight=2 if self._settings.value('pipeline') else 1)
        qos = QoSProfile(depth=1, reliability=ReliabilityPolicy.BEST_EFFORT)
        try:
            self._subscription = self.create_subscription(
                PointCloud2, INPUT, self.receive, qos,
                qos_overriding_options=QoSOverridingOptions.with_default_policies())
        except RuntimeError as error:  # a wrong value of a qos_overrides parameter
            raise ConfigError(f'qos_overrides: {" ".join(str(error).split())}') from None
        self.get_logger().info(f'active: {self._subscription.topic_name} -> '
                               f'{self._publisher.topic_name}')

    def deactivate(self) -> None:
        """Unsubscribe, finish the cloud in progress, forget the past sweeps."""
        if self._subscription is not None:
            self.destroy_subscription(self._subscription)
            self._subscription = None
        self.stop_frames()
        if self._model is not None and not self.abandoned:
            self._model.reset_stream()

    def release(self) -> None:
        """Close the model and stop listening to TF."""
        if self._publisher is not None:
            self.destroy_lifecycle_publisher(self._publisher)
            self._publisher = None
        if self._time_jump is not None:
            self._time_jump.unregister()
            self._time_jump = None
        self._close_transforms()
        self._per_call = {}
        self._writer = self._points = None
        if self._model is not None and not self.abandoned:
            model, self._model = self._model, None
            model.close()

    def process(self, message: Any) -> Future[Detections3D]:
        """See :meth:`FrameNode.process`."""
        config = self._model.config
        cloud = decode_cloud(message, use_intensity=config.grid.use_intensity, out=self._points)
        self._points = cloud.buffer
        stamp_ns = stamp_to_ns(message.header.stamp)
        pose = self._pose(message.header.frame_id, stamp_ns)
        num_jumps = self._num_jumps
        stream = {'id': INPUT, 'timestamp_s': stamp_ns * 1e-9, 'T_world_from_ego': pose,
                  'reset': num_jumps != self._num_jumps_seen}
        result = self._model.submit(cloud, stream=stream, **self._per_call)
        self._num_jumps_seen = num_jumps
        return result

    def answer(self, message: Any, result: Detections3D) -> None:
        """See :meth:`FrameNode.answer`."""
        self._publisher.publish(self._writer.write(message.header, result))
        self._diagnose(message.header.stamp, result)

    def _load(self) -> Any:
        model = self.create_model()
        try:
            if not self._stop.is_set():
                model.warmup()
        except BaseException:
            model.close()
            raise
        return model

    def _check_lidar_only(self) -> None:
        for name in _IMAGE_BACKBONE:
            if value := self._settings.value(name):
                raise ConfigError(f'{name}: found {value!r}, expected an empty text: this node '
                                  'detects in lidar clouds only')

    def _class_names(self) -> tuple[str, ...]:
        try:
            return self._settings.value('class_names')
        except ConfigError:  # said by configure
            return PARAMETERS['class_names'].default

    def _declare_scores(self, class_names: tuple[str, ...]) -> list[str]:
        return self._settings.declare(score_parameter(name) for name in class_names)

    def _show_parameters(self, config: Any) -> None:
        """Let the parameters show what is in use, also what came from the artifact."""
        self._declare_scores(config.class_names)
        # Only now is it known which classes have a threshold.
        given = {name: value for name, value in self._settings.given().items()
                 if name not in PARAMETERS and name.startswith('detection_score_thresholds.')}
        absent = sorted(given.keys() - config.parameters.keys())
        if absent:
            self.get_logger().warning(', '.join(absent) + ': have no effect, the classes are '
                                      + ', '.join(config.class_names))
        self._change({name: value for name, value in given.items() if name not in absent})
        self._settings.show({**config.parameters, **self._per_call})

    def _change(self, values: Mapping[str, Any]) -> None:
        """Use other values of per-call parameters from the next cloud on."""
        merged = {**self._per_call, **values}
        self._model.config.replace(**merged)
        self._per_call = merged

    def _pose(self, frame: str, stamp_ns: int) -> np.ndarray | None:
        """Return T_world_from_ego float64 [4, 4] at the time of the cloud.

        A transform that may still arrive is waited for, at most for one period of the sensor.

        :raises TransformError: there is none.
        """
        if self._transforms is None:
            return None
        deadline_s = time.monotonic() + self.period_s
        while True:
            self._transform_arrived.clear()
            try:
                return self._transforms.lookup_matrix(self._world_frame, frame, stamp_ns)
            except TransformError as error:
                remaining_s = deadline_s - time.monotonic()
                if not error.may_arrive or remaining_s <= 0 or self.is_stopping:
                    raise
            self._transform_arrived.wait(remaining_s)

    def _close_transforms(self) -> None:
        if self._transforms is not None:
            self._transforms.close()
            self._transforms = None

    def _warn_tf(self, text: str) -> None:
        self.warn_throttled('tf', f'TF ignored: {text}')

    def _on_time_jump(self, _jump: Any) -> None:
        """Start anew after time jumped back, as it does when a bag is played in a loop."""
        self._num_jumps += 1
        if self._transforms is not None:
            self._transforms.clear()
        self.drop_waiting_frame()
        self.get_logger().info('time jumped back: transforms and past sweeps are forgotten')

    def _diagnose(self, stamp: Any, detections: Detections3D) -> None:
        """Say how this cloud went; each kind of problem is also logged, throttled."""
        problems = _problems(detections.meta)
        self.diagnostics.publish(stamp, 'bevfusion_trt', Level.WARN if problems else Level.OK,
                                 '; '.join(problems.values()) or 'OK', _values(detections.meta))
        for key, text in problems.items():
            self.warn_throttled(key, text)


def _values(meta: Mapping[str, Any]) -> dict[str, Any]:
    """Return key -> value of the status of one cloud; the keys are those of ``meta``."""
    values = {key: meta[key] for key in (
        'is_num_voxels_within_range', 'num_voxels_clipped', 'num_sweeps_skipped',
        'num_points_dropped')}
    values.update({f'postprocess.{key}': meta['postprocess'][key]
                   for key in ('non_finite', 'unknown_class')})
    return values


def _problems(meta: Mapping[str, Any]) -> dict[str, str]:
    """Return key -> text of what makes the answer to one cloud doubtful."""
    counts = meta['postprocess']
    problems = {}
    if not meta['is_num_voxels_within_range']:
        problems['is_num_voxels_within_range'] = (
            f'cloud: more voxels than the maximum; {meta["num_voxels_clipped"]} are left out')
    if skipped := meta['num_sweeps_skipped']:
        problems['num_sweeps_skipped'] = (
            f'cloud: {skipped} past sweeps do not fit into cloud_capacity and are left out')
    if broken := counts['non_finite']:
        problems['postprocess.non_finite'] = (
            f'network: {broken} of {counts["proposals"]} proposals are not finite and are '
            'dropped; the weights may be damaged')
    if unknown := counts['unknown_class']:
        problems['postprocess.unknown_class'] = (
            f'network: {unknown} proposals are of a class without a label and become UNKNOWN; '
            'class_names may not be those of the weights')
    return problems


def _objects_writer() -> DetectedObjectsWriter:
    try:
        return DetectedObjectsWriter()
    except ImportError as error:
        raise PerceptionError(
            f'{error.name}: the message package is not installed; install Autoware, or run '
            'interfaces/build.py') from None
