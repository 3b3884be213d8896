# SPDX-License-Identifier: Apache-2.0
"""The demo: it plays, shows, checks, draws, and ends what it has started."""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from tt_perception import demo, recording
from tt_perception.recording import read_recording
from tt_perception.runtime.errors import ArtifactError, InputError
from tt_perception.sim.bag import write_bag
from tt_perception.sim.drive import Drive
from tt_perception.sim.lidar import LIDARS
from tt_perception.terminal import Terminal

TESTS = Path(__file__).resolve().parent


@pytest.fixture(scope='module')
def bag(tmp_path_factory):
    pytest.importorskip('rosbags', reason='rosbags writes and reads bags')
    path = tmp_path_factory.mktemp('bags') / 'drive'
    write_bag(path, Drive(5, 3, lidar=[LIDARS[64], LIDARS[32], LIDARS[32]]))
    return path


def test_recording_is_looked_through(bag):
    found = read_recording(bag)
    assert found.topic == '/sensing/lidar/concatenated/pointcloud'
    assert found.tf_topics == ('/tf', '/tf_static')
    assert found.has_pose
    drive = Drive(5, 3, lidar=[LIDARS[64], LIDARS[32], LIDARS[32]])
    assert [(c.stamp_ns, c.frame_id, c.num_points) for c in found.clouds] == [
        (sweep.stamp_ns, 'base_link', len(sweep.points)) for sweep in drive]


def test_recordings_of_no_use_are_refused(tmp_path, data_dir):
    with pytest.raises(InputError, match='nothing_here'):
        read_recording(tmp_path / 'nothing_here')
    with pytest.raises(InputError, match='PointCloud2'):
        read_recording(data_dir / 'permissive' / 'bags' / 'velodyne_vlp16_packets')


def test_a_recording_of_no_use_is_refused_before_weights_are_fetched(tmp_path, monkeypatch):
    monkeypatch.setattr(demo, '_weights', lambda *_: pytest.fail('weights were asked for'))
    with pytest.raises(InputError, match='no such bag'):
        demo.run_demo(argparse.Namespace(bag=tmp_path / 'nothing', weights=None, out=tmp_path))


@pytest.mark.parametrize('edges, connected', [
    ([], False),
    ([('map', 'base_link')], True),
    ([('odom', 'base_link'), ('map', 'odom'), ('base_link', 'lidar')], True),
    ([('map', 'odom'), ('base', 'base_link')], False),
])
def test_transforms_lead_to_the_cloud_or_not(edges, connected):
    assert recording._connected(edges, 'map', 'base_link') is connected


def test_processes_end_with_what_they_started(tmp_path):
    """Also when they do not want to."""
    module = tmp_path / 'stubborn.py'
    module.write_text('import signal, subprocess, sys, time\n'
                      'signal.signal(signal.SIGINT, signal.SIG_IGN)\n'
                      'child = subprocess.Popen([sys.executable, "-c", '
                      '"import time; time.sleep(60)"])\n'
                      'print(child.pid, flush=True)\n'
                      'time.sleep(60)\n')
    before = os.environ.get('PYTHONPATH', '')
    os.environ['PYTHONPATH'] = os.pathsep.join(filter(None, [str(tmp_path), before]))
    limit, demo.END_LIMIT_S = demo.END_LIMIT_S, 0.5
    try:
        process = demo._Process('stubborn', tmp_path / 'log', 'stubborn')
        deadline = time.monotonic() + 20
        while not process.last_lines() and time.monotonic() < deadline:
            time.sleep(0.02)
        child = int(process.last_lines()[0])
        process.end()
        assert process.returncode == -signal.SIGKILL
        while Path(f'/proc/{child}').exists() and time.monotonic() < deadline:
            if Path(f'/proc/{child}/stat').read_text().split()[2] == 'Z':
                break  # dead; whoever adopted it has not noticed yet
            time.sleep(0.02)
        else:
            assert not Path(f'/proc/{child}').exists()
        process.end()  # may be repeated
    finally:
        demo.END_LIMIT_S = limit
        os.environ['PYTHONPATH'] = before


# The whole demo, in a process of its own, with the node's model replaced by one that is quick.

_RUN = '''
import argparse, sys
from pathlib import Path
from tt_perception import demo, recording
from tt_perception.recording import read_recording
demo.NODE_MODULE = 'fake_bevfusion'
demo.ANSWER_LIMIT_S = {limit_s}
demo.GRACE_S = 1.0
demo._weights = lambda choice, terminal: demo._Weights({weights!r}, {is_random})
sys.exit(demo.run_demo(argparse.Namespace(bag=Path({bag!r}) if {bag!r} else None,
                                          weights=None, out=Path({out!r}))))
'''


def start_demo(out, bag=None, is_random=True, limit_s=60, weights='', **env):
    pytest.importorskip('rclpy', reason='no ROS here')
    pytest.importorskip('autoware_perception_msgs.msg', reason='no Autoware messages here')
    code = _RUN.format(limit_s=limit_s, is_random=is_random, bag=str(bag or ''), out=str(out),
                       weights=weights)
    python_path = [str(TESTS.parent), str(TESTS), os.environ.get('PYTHONPATH', '')]
    return subprocess.Popen(
        [sys.executable, '-c', code], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        env={**os.environ, 'PYTHONPATH': os.pathsep.join(filter(None, python_path)), **env})


def test_demo_answers_every_cloud_of_a_simulated_drive_and_draws(tmp_path):
    process = start_demo(tmp_path, FAKE_DELAY_S='0.2')
    output, _ = process.communicate(timeout=120)
    assert process.returncode == 0, output
    count = len(demo.ROWS)
    assert f'answered    {count} of {count} clouds' in output
    rows = [line.split() for line in output.splitlines() if ' 1767258000.' in line]
    assert [row[0] for row in rows] == [str(i + 1) for i in range(count)]
    assert all(row[3] == row[4] == '1' for row in rows)  # one object, a car
    times_ms = [int(row[-1]) for row in rows if row[-1] != '-']  # the first may not be heard
    assert len(times_ms) >= count // 2 and all(100 <= ms < 60_000 for ms in times_ms)
    assert 'mean nothing' in output
    assert (tmp_path / 'birds_eye.png').stat().st_size > 100_000
    clouds = read_recording(tmp_path / 'simulated_drive').clouds
    assert clouds[0].num_points > 1.5 * clouds[-1].num_points  # 64 rows, then 32


def test_demo_fails_when_the_node_does(tmp_path, bag):
    process = start_demo(tmp_path, bag, limit_s=5, FAKE_FAIL_AT='2')
    output, _ = process.communicate(timeout=120)
    assert process.returncode == 1, output
    assert 'FAILED: ' in output
    assert 'injected fault' in output  # the end of the node's log


def test_demo_does_not_wait_for_a_node_that_cannot_start(tmp_path, bag):
    weights = tmp_path / 'damaged.onnx'
    process = start_demo(tmp_path / 'out', bag, weights=str(weights))
    output, _ = process.communicate(timeout=60)  # the node would have 300 s
    assert process.returncode == 1, output
    assert 'FAILED: the node ended with exit code 1' in output
    assert f'{weights}: no such file or folder' in output  # the node's reason
    assert 'Traceback' not in output


def test_demo_ends_its_processes_on_sigterm(tmp_path, bag):
    process = start_demo(tmp_path, bag, FAKE_DELAY_S='30')
    log = tmp_path / 'player.log'
    deadline = time.monotonic() + 60
    while not log.exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    assert log.exists()
    children = Path(f'/proc/{process.pid}/task/{process.pid}/children').read_text().split()
    assert len(children) == 2
    process.send_signal(signal.SIGTERM)
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 130, output
    assert not any(Path(f'/proc/{child}').exists() for child in children)


def test_random_weights_are_made_once(tmp_path, monkeypatch):
    """And a failed attempt leaves nothing that looks like them."""
    monkeypatch.setenv('XDG_CACHE_HOME', str(tmp_path))
    calls = []

    def fake_run(command, **_):
        folder = Path(command[-1])
        folder.mkdir(parents=True)
        calls.append(folder)
        if len(calls) == 1:
            return argparse.Namespace(returncode=1, stderr='Traceback\nno space left\n')
        for name in ('bevfusion_lidar.onnx', 'ml_package_bevfusion_lidar.param.yaml',
                     'detection_class_remapper.param.yaml'):
            (folder / name).write_bytes(b'x')
        return argparse.Namespace(returncode=0, stderr='')

    monkeypatch.setattr(demo.subprocess, 'run', fake_run)
    terminal = Terminal()
    with pytest.raises(ArtifactError, match='no space left'):
        demo._random_artifact(terminal)
    assert not calls[0].exists()
    first = demo._random_artifact(terminal)
    assert (first / 'bevfusion_lidar.onnx').exists()
    assert demo._random_artifact(terminal) == first
    assert len(calls) == 2


def test_wrong_answers_are_named(tmp_path):
    from tt_perception.ros.demo_monitor import Answer
    head = recording.CloudHead
    clouds = head(10**9, 'a', 1), head(2 * 10**9, 'a', 1)
    two_clouds = recording.Recording(Path('x'), '/c', clouds, (), False)
    run = demo._Run(two_clouds, demo._Weights('', False), tmp_path, Terminal())
    empty = np.zeros(0)
    right = [Answer(10**9, 'a', empty, None), Answer(2 * 10**9, 'a', empty, None)]
    run._answers = right
    assert run._wrong_answers() == []
    run._answers = [right[0]]
    assert ['1 of 2 clouds' in fault for fault in run._wrong_answers()] == [True]
    run._answers = [*right, right[0]]
    assert ['one too many: 1.000' in fault for fault in run._wrong_answers()] == [True]
    run._answers = [right[0], Answer(2 * 10**9, 'b', empty, None)]
    assert len(run._wrong_answers()) == 2


def test_recordings_without_poses_are_played_as_single_sweeps(tmp_path):
    """The node would refuse every cloud for its missing transform."""
    weights = demo._Weights('some where/model.onnx', False)
    for has_pose in (False, True):
        found = recording.Recording(Path('x'), '/c', (), (), has_pose)
        arguments = demo._Run(found, weights, tmp_path, Terminal())._node_arguments()
        assert ('densification_num_past_frames:=0' in arguments) is not has_pose
        assert f'model_path:={Path("some where/model.onnx").resolve()}' in arguments
        assert '~/input/pointcloud:=/c' in arguments


@pytest.mark.parametrize('is_random', [False, True])
def test_given_weights_say_whether_they_are_random(tmp_path, capsys, is_random):
    for name in ('bevfusion_lidar.onnx', 'ml_package_bevfusion_lidar.param.yaml',
                 'detection_class_remapper.param.yaml', *(['RANDOM_WEIGHTS'] * is_random)):
        (tmp_path / name).touch()
    weights = demo._weights(str(tmp_path), Terminal())
    assert weights == demo._Weights(str(tmp_path / 'bevfusion_lidar.onnx'), is_random)
    assert ('mean nothing' in capsys.readouterr().out) is is_random


@pytest.mark.slow
def test_the_real_demo_answers_every_cloud(full_artifact, tmp_path):
    pytest.importorskip('autoware_perception_msgs.msg', reason='no Autoware messages here')
    done = subprocess.run(
        [sys.executable, '-m', 'tt_perception.cli', 'demo', '--weights', str(full_artifact),
         '--out', str(tmp_path / 'out')], capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stdout + done.stderr
    assert '10 of 10 clouds' in done.stdout
    assert 'mean nothing' in done.stdout
    assert (tmp_path / 'out' / 'birds_eye.png').stat().st_size > 100_000
