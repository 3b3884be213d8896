# SPDX-License-Identifier: Apache-2.0
"""Parameters from keywords and from files: what is wrong is refused in one line by its name."""

from __future__ import annotations

import array

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tt_perception.bevfusion.config import (
    PARAMETERS,
    BEVFusionConfig,
    known_parameters,
    load_yaml,
    read_parameter_file,
)
from tt_perception.runtime.errors import ArtifactError, ConfigError

SCORE = 'detection_score_thresholds.min_confidence_scores.'


def refused(call, *arguments, error=ConfigError, **named) -> str:
    """Return the message, one line of a bearable length."""
    with pytest.raises(error) as caught:
        call(*arguments, **named)
    message = str(caught.value)
    assert '\n' not in message and len(message) < 500
    return message


@pytest.mark.parametrize(('name', 'value'), [
    ('densification_num_past_frames', 10 ** 9),
    ('max_points_per_voxel', 2 ** 31),
    ('cloud_capacity', 2 ** 31),
    ('num_proposals', 2 ** 63),
    pytest.param('num_proposals', 10 ** 5000, id='digits of an integer'),
    ('num_proposals', 1e300),
    ('iou_nms_threshold', 10 ** 400),
    pytest.param('iou_nms_threshold', 10 ** 5000, id='digits of a number'),
    ('voxel_size', [1e-300, 0.17, 0.2]),
    ('voxel_size', [1e-44, 0.17, 0.2]),
    ('voxel_size', [1e-9, 1e-9, 0.2]),
    ('voxel_size', [1e300, 0.17, 0.2]),
    ('voxel_size', [-0.17, 0.17, 0.2]),
    ('voxel_size', [500.0, 0.17, 0.2]),
    ('point_cloud_range', [-1e300, -122.4, -3, 1e300, 122.4, 5]),
    ('point_cloud_range', [-3e38, -122.4, -3, 3e38, 122.4, 5]),
    ('point_cloud_range', [0, 0, 0, 0, 10, 10]),
    ('point_cloud_range', [float('nan'), 0, 0, 1, 1, 1]),
])
def test_values_beyond_the_machine_are_refused_by_name(name, value):
    assert refused(BEVFusionConfig.from_parameters, {name: value}).startswith(f'{name}: found ')


@pytest.mark.parametrize('value', [
    5, 0.5, None, 'abc', b'abc', {0.3: 1}, {0.1, 0.2, 0.3}, np.array(0.3), (0.3 for _ in range(3)),
    np.zeros((3, 3)), ['a', 'b', 'c'], [[1], [2], [3]], [0.1, 0.2, True]])
def test_what_is_no_list_of_numbers_is_refused(value):
    assert 'voxel_size: found' in refused(PARAMETERS['voxel_size'].check, value)


@pytest.mark.parametrize('value', [
    [1, 2, 3], (1.0, 2.0, 3.0), np.array([1, 2, 3]), np.float32([1, 2, 3]), range(1, 4),
    array.array('d', [1, 2, 3])])
def test_lists_of_any_kind_become_tuples(value):
    found = PARAMETERS['voxel_size'].check(value)
    assert found == (1.0, 2.0, 3.0) and all(type(v) is float for v in found)


def test_thresholds_beyond_float32_are_infinite_without_a_warning(recwarn):
    config = BEVFusionConfig.from_parameters({
        'detection_score_thresholds.distance_bin_upper_limits': [50.0, 1e300]})
    assert config.postprocess.distance_limits_m.tolist() == [50.0, np.inf]
    assert not recwarn.list


@pytest.mark.parametrize('name', ['FOO', 'car', ''])
def test_a_score_threshold_of_an_unknown_class_is_refused(name):
    values = {SCORE + name: [0.5] * 4}
    for call, arguments in ((BEVFusionConfig.from_parameters, (values,)),
                            (lambda: BEVFusionConfig.from_parameters({}).replace(**values), ())):
        message = refused(call, *arguments)
        assert message.startswith(SCORE + name + ': no such class')
        assert message.endswith('CAR, TRUCK, BUS, BICYCLE, PEDESTRIAN')


def test_score_thresholds_follow_the_class_names():
    config = BEVFusionConfig.from_parameters({
        'class_names': ['CAR', 'TREE'], SCORE + 'TREE': [0.5] * 4})
    np.testing.assert_array_equal(config.postprocess.min_scores[:, 1], np.float32(0.5))
    changed = config.replace(**{SCORE + 'CAR': [0.25] * 4})
    np.testing.assert_array_equal(changed.postprocess.min_scores[0], np.float32([0.25, 0.5]))
    assert SCORE + 'BUS' in refused(config.replace, **{SCORE + 'BUS': [0.5] * 4})


def test_files_may_hold_thresholds_of_other_classes():
    """Upstream has one parameter file for networks of five and of seven classes."""
    values = {SCORE + name: [0.2] * 4 for name in ('CAR', 'TRAFFIC_CONE')}
    values['something_new'] = 1
    assert known_parameters(values) == {SCORE + 'CAR': [0.2] * 4}
    values['class_names'] = ['TRAFFIC_CONE']
    assert set(known_parameters(values)) == {'class_names', SCORE + 'TRAFFIC_CONE'}
    values['class_names'] = 5
    assert refused(known_parameters, values).startswith('class_names: found 5')


@pytest.fixture
def read(tmp_path):
    def read_text(text):
        path = tmp_path / 'x.param.yaml'
        path.write_bytes(text if isinstance(text, bytes) else text.encode())
        return read_parameter_file(path)
    return read_text


def test_parameter_files_become_dotted_names(read):
    assert read('/**:\n  ros__parameters:\n    a: {b: [1, 2], c: {d: x}}\n    e: 0.5\n') == {
        'a.b': [1, 2], 'a.c.d': 'x', 'e': 0.5}


LAUGHS = '/**: {ros__parameters: {a0: &a0 {k: 1}, ' + ', '.join(
    f'a{i}: &a{i} {{' + ', '.join(f'k{j}: *a{i - 1}' for j in range(9)) + '}'
    for i in range(1, 30)) + '}}'
MERGES = '/**: {ros__parameters: {a0: &a0 {k: 1}, ' + ', '.join(
    f'a{i}: &a{i} {{<<: [' + ', '.join([f'*a{i - 1}'] * 9) + ']}' for i in range(1, 30)) + '}}'


@pytest.mark.parametrize('text', [
    LAUGHS, MERGES, '/**: &a {ros__parameters: *a}', '/**: {ros__parameters: &a {b: *a}}',
    '&a {a: *a}', '[' * 3000, '{a: ' * 3000, '/**: {ros__parameters: {x: 2001-99-99}}',
    '/**: {ros__parameters: {x: !!int x}}', '/**: {ros__parameters: {x: !!bool x}}',
    '/**: {ros__parameters: {x: !!timestamp x}}', 'x: ' + '9' * 5000, 'x: !!python/object:a.b {}',
    '{[1]: 2}', '{', 'a: b: c', '', 'a: 1', 'ros__parameters: 5', '- ros__parameters: {}',
    b'\xff\xfe\xfd', 'x: "\x00"', 'x' * (1 << 20) + ': 1'], ids=lambda text: str(text[:40]))
def test_parameter_files_that_are_refused(read, text):
    refused(read, text, error=ArtifactError)


def test_an_alias_is_named_with_its_line(read):
    message = refused(read, '/**:\n  ros__parameters:\n    a: &a 1\n    b: *a\n',
                      error=ArtifactError)
    assert 'found an alias' in message and 'line 4' in message
    assert read('/**: {ros__parameters: {a: &a 1}}') == {'a': 1}  # an anchor alone is harmless


@settings(deadline=None, max_examples=200)
@given(st.text(alphabet='{}[]:,&*!<-? \nax1.#"\'|>%', max_size=40))
def test_any_yaml_is_read_or_refused(text):
    try:
        load_yaml(text)
    except ValueError as error:
        assert '\n' not in str(error)
