# SPDX-License-Identifier: Apache-2.0
"""Parameters of a node: declared from tables, checked by the package's own rules.

rclpy's static types refuse ``20`` for ``20.0`` and end the node with an exception in its
constructor. So every parameter is declared with dynamic typing, and a wrong value fails
``configure`` with one line that begins with the parameter's name.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from rcl_interfaces.msg import ParameterDescriptor, SetParametersResult
from rclpy.parameter import Parameter as RosParameter

from tt_perception.bevfusion.config import Parameter
from tt_perception.runtime.errors import ConfigError

BEVFUSION_NODE_PARAMETERS = (
    Parameter('model_path', 'str', '',
              'folder of the artifact, or its .onnx file; empty for the pinned release'),
    Parameter('onnx_path', 'str', '',
              'the .onnx file, wins over model_path; the other two files lie beside it'),
    Parameter('backend', 'str', 'auto', 'where the network runs: auto, tt or cpu'),
    Parameter('device_id', 'int', 0, 'which card; backend tt'),
    Parameter('dispatch', 'str', 'auto', 'cores that hand out work: auto, eth or worker; '
              'backend tt'),
    Parameter('timeout_s', 'float', 5.0, 'when the card is given up; backend tt'),
    Parameter('pipeline', 'int', 0, '0: one cloud at a time; 1: the next one is prepared while '
              'the network runs; 2: with two sets of upload buffers'),
    Parameter('image_backbone_onnx_path', 'str', '', 'camera fusion; must be empty'),
    Parameter('image_backbone_engine_path', 'str', '', 'camera fusion; must be empty'),
    Parameter('image_backbone_trt_precision', 'str', '', 'camera fusion; must be empty'),
    Parameter('build_only', 'bool', False, 'end the process after configure'),
)

# Parameters of autoware_bevfusion that mean nothing here. They are declared so that tools which
# list or read them work as before; any value is accepted.
BEVFUSION_UNUSED: dict[str, Any] = {
    'max_camera_lidar_delay': 0.0,
    'plugins_path': '',
    'trt_precision': 'fp16',
    'engine_path': '',
    'run_image_undistortion': False,
    'use_compressed_images': False,
    'd_bound': [1.0, 166.2, 1.4],
    'x_bound': [-122.4, 122.4, 0.68],
    'y_bound': [-122.4, 122.4, 0.68],
    'z_bound': [-10.0, 10.0, 20.0],
    'num_cameras': 0,
    'raw_image_height': 0,
    'raw_image_width': 0,
    'img_aug_scale_x': 0.0,
    'img_aug_scale_y': 0.0,
    'roi_height': 0,
    'roi_width': 0,
    'features_height': 0,
    'features_width': 0,
    'num_depth_features': 0,
    'image_feature_channel': 0,
    'diagnostics.max_allowed_processing_time_ms': 200.0,
    'diagnostics.max_acceptable_consecutive_delay_ms': 1000.0,
    'diagnostics.validation_callback_interval_ms': 100.0,
}


class NodeParameters:
    """The declared parameters of a node.

    Outside of the unconfigured state only ``per_call`` parameters may be set.

    :ivar is_fixed: says whether the node is past the unconfigured state.
    :ivar on_change: takes name -> checked value of parameters that change while the node is
        configured; raises :class:`ConfigError` to refuse them.
    """

    def __init__(self, node: Any, is_fixed: Callable[[], bool],
                 on_change: Callable[[Mapping[str, Any]], None]) -> None:
        """Watch the parameters of ``node``."""
        self._node = node
        self._is_fixed = is_fixed
        self._on_change = on_change
        self._table: dict[str, Parameter] = {}
        self._given: set[str] = set()
        self._is_internal = False
        node.add_on_set_parameters_callback(self._on_set)

    def declare(self, parameters: Iterable[Parameter]) -> list[str]:
        """Declare those that are not declared yet; return the names that a user has given."""
        given = []
        for parameter in parameters:
            if parameter.name in self._table:
                continue
            self._table[parameter.name] = parameter
            if self._declare(parameter.name, parameter.default, parameter.description):
                given.append(parameter.name)
        self._given.update(given)
        return given

    def declare_unused(self, defaults: Mapping[str, Any]) -> None:
        """Declare parameters whose value means nothing."""
        for name, default in defaults.items():
            self._declare(name, default, 'accepted for compatibility; has no effect')

    def value(self, name: str) -> Any:
        """Return the checked value of one parameter.

        :raises ConfigError: it is wrong.
        """
        return self._table[name].check(self._node.get_parameter(name).value)

    def given(self) -> dict[str, Any]:
        """Return the checked values that a user has given, by file, command line or service.

        :raises ConfigError: one of them is wrong.
        """
        return {name: self.value(name) for name in sorted(self._given)}

    def show(self, values: Mapping[str, Any]) -> None:
        """Set what the user has not given to the value that is in use."""
        self._set_internal({name: value for name, value in values.items()
                            if name in self._table and name not in self._given})

    def _declare(self, name: str, default: Any, description: str) -> bool:
        """Declare one parameter; return whether a user has given it."""
        self._is_internal = True
        try:
            # Without a default, it shows whether there is a value from outside.
            declared = self._node.declare_parameter(name, None, ParameterDescriptor(
                description=description, dynamic_typing=True))
        finally:
            self._is_internal = False
        if declared.type_ != RosParameter.Type.NOT_SET:
            return True
        self._set_internal({name: default})
        return False

    def _set_internal(self, values: Mapping[str, Any]) -> None:
        self._is_internal = True
        try:
            self._node.set_parameters_atomically([
                RosParameter(name, value=list(value) if isinstance(value, tuple) else value)
                for name, value in values.items()])
        finally:
            self._is_internal = False

    def _on_set(self, parameters: list[RosParameter]) -> SetParametersResult:
        if self._is_internal:
            return SetParametersResult(successful=True)
        try:
            changed = {parameter.name: self._checked(parameter) for parameter in parameters
                       if parameter.name in self._table}
            if changed and self._is_fixed():
                self._on_change(changed)
        except ConfigError as error:
            return SetParametersResult(successful=False, reason=str(error))
        self._given.update(changed)
        return SetParametersResult(successful=True)

    def _checked(self, parameter: RosParameter) -> Any:
        declared = self._table[parameter.name]
        if self._is_fixed() and not declared.per_call:
            raise ConfigError(f'{declared.name}: fixed while the node is configured; clean the '
                              'node up, set it, and configure again')
        return declared.check(parameter.value)


def source_of(model_path: str, onnx_path: str) -> str | None:
    """Return where the model is to be loaded from, None for the pinned release.

    :raises ConfigError: a path still holds a substitution of a launch file.
    """
    # Autoware's parameter file leaves this to ros2 launch, which is not there on every machine.
    if model_path:
        onnx_path = onnx_path.replace('$(var model_path)', model_path)
    for name, path in (('model_path', model_path), ('onnx_path', onnx_path)):
        if '$(' in path:
            raise ConfigError(f'{name}: found {path!r}, expected a path; a launch file replaces '
                              '$(...), or set model_path')
    return onnx_path or model_path or None
