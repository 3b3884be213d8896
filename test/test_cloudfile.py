# SPDX-License-Identifier: Apache-2.0
"""Files, arrays and tensors become named columns, or are refused with one line that says why."""

from __future__ import annotations

import io
import struct
import time
import tracemalloc
import zipfile
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from recordings import PERMISSIVE_PCDS, kitti_points, nuscenes_points

from tt_perception.bevfusion.cloudfile import MAX_POINTS, as_points, read_cloud
from tt_perception.runtime.errors import InputError

XYZ = ('x', 'y', 'z')
XYZI = (*XYZ, 'intensity')
ENCODINGS = ('ascii', 'binary', 'binary_compressed')
KITTI_POINTS = {'000000': 125_635, '000002': 115_604, '000005': 109_773}
FIELDS = (  # name, TYPE and SIZE, COUNT: in an order and with gaps as PCL writes them
    ('time_stamp', 'U4', 1), ('_', 'U1', 3), ('y', 'F4', 1), ('normal', 'F4', 3), ('x', 'F4', 1),
    ('intensity', 'U1', 1), ('z', 'F8', 1), ('label', 'I2', 2),
)


def refused(call, *arguments, reason='file', **named) -> str:
    """Return the message of what must be refused with one line."""
    with pytest.raises(InputError) as caught:
        call(*arguments, **named)
    assert caught.value.reason == reason
    assert '\n' not in str(caught.value)
    return str(caught.value)


def lzf_runs(data: bytes) -> bytes:
    """Pack as runs of literals only."""
    runs = [data[i:i + 32] for i in range(0, len(data), 32)]
    return b''.join(bytes([len(run) - 1]) + run for run in runs)


def lzf_copies(data: bytes) -> bytes:
    """Pack with the longest copy of earlier bytes found at each place."""
    out, literals, i = bytearray(), bytearray(), 0
    last_seen: dict[bytes, int] = {}

    def flush():
        out.extend(lzf_runs(bytes(literals)))
        literals.clear()

    while i < len(data):
        source = last_seen.get(data[i:i + 3], -1)
        last_seen[data[i:i + 3]] = i
        length = 0
        if source >= 0 and i - source <= 8192:
            while length < 264 and i + length < len(data) \
                    and data[source + length] == data[i + length]:
                length += 1
        if length < 3:
            literals.append(data[i])
            i += 1
            continue
        flush()
        distance = i - source - 1
        if length - 2 < 7:
            out.append((length - 2) << 5 | distance >> 8)
        else:
            out.extend((7 << 5 | distance >> 8, length - 9))
        out.append(distance & 255)
        i += length
    flush()
    return bytes(out)


def sample(n: int = 300, seed: int = 0) -> dict[str, np.ndarray]:
    """Return values for FIELDS, with repetitions to compress; one array [n] or [n, COUNT] each."""
    rng = np.random.default_rng(seed)
    values = {}
    for name, kind, count in FIELDS:
        numbers = rng.integers(0, 100, (n, count)) / (4 if kind[0] == 'F' else 1)
        values[name] = numbers.astype(kind.lower())[:, 0 if count == 1 else slice(None)]
    values['x'][n // 2:] = values['x'][:n - n // 2]
    return values


def pcd(values: dict[str, np.ndarray], encoding: str, pack=lzf_copies, **replaced) -> bytes:
    """Write a PCD file; ``replaced`` puts other words into header lines, None leaves one out."""
    n = len(values['x'])
    lines = {
        'VERSION': '0.7',
        'FIELDS': ' '.join(name for name, _, _ in FIELDS),
        'SIZE': ' '.join(kind[1] for _, kind, _ in FIELDS),
        'TYPE': ' '.join(kind[0] for _, kind, _ in FIELDS),
        'COUNT': ' '.join(str(count) for _, _, count in FIELDS),
        'WIDTH': n, 'HEIGHT': 1, 'VIEWPOINT': '0 0 0 1 0 0 0', 'POINTS': n,
        **replaced, 'DATA': encoding}
    header = '# .PCD v0.7 - Point Cloud Data file format\n' + ''.join(
        f'{key} {words}\n' for key, words in lines.items() if words is not None)
    columns = [values[name].reshape(n, count) for name, _, count in FIELDS]
    if encoding == 'ascii':
        body = ''.join(' '.join(str(number) for column in columns for number in column[i].tolist())
                       + '\n' for i in range(n)).encode()
    elif encoding == 'binary':
        body = b''.join(column[i].tobytes() for i in range(n) for column in columns)
    else:
        data = b''.join(column.tobytes() for column in columns)
        packed = pack(data)
        body = struct.pack('<II', len(packed), len(data)) + packed
    return header.encode() + body


@pytest.fixture
def write(tmp_path):
    """Return a function that puts bytes into a file of the given name."""
    def put(name: str, data: bytes) -> Path:
        path = tmp_path / name
        path.write_bytes(data)
        return path
    return put


def npy(array: np.ndarray) -> bytes:
    stream = io.BytesIO()
    np.save(stream, array)
    return stream.getvalue()


def npz(**arrays: np.ndarray) -> bytes:
    stream = io.BytesIO()
    np.savez_compressed(stream, **arrays)
    return stream.getvalue()


@pytest.mark.parametrize('name', PERMISSIVE_PCDS)
def test_recorded_pcd_files(data_dir, name):
    points, columns = read_cloud(data_dir / 'permissive' / 'lidar' / name)
    assert len(points) == PERMISSIVE_PCDS[name]
    has_intensity = 'velodyne_vlp16' in name or 'autoware' in name
    assert columns == (XYZI if has_intensity else XYZ)
    assert points.dtype == np.float32
    assert np.isfinite(points).all()
    if name == 'autoware_ground_segmentation_test.pcd':
        assert (points[:, 3] == 128).all()
        assert (points[:, :3] == 0).all(1).sum() == 17_488
    if name == 'velodyne_vlp16_xyzircaedt.pcd':
        assert (points[:, 3].min(), points[:, 3].max()) == (0, 119)
        distance = np.linalg.norm(points[:, :3], axis=1)
        assert 0.4 < distance.min() < 0.6
        assert 14.5 < distance.max() < 14.7


@pytest.mark.parametrize('frame', KITTI_POINTS)
def test_recorded_kitti_bin_files(data_dir, frame):
    path = data_dir / 'noncommercial' / 'kitti_pointpillars' / f'{frame}.bin'
    points, columns = read_cloud(path)
    assert columns == XYZI
    assert len(points) == KITTI_POINTS[frame]
    np.testing.assert_array_equal(points, kitti_points(data_dir, frame))
    assert len(read_cloud(data_dir / 'noncommercial/kitti_000008/000008.bin')[0]) == 17_238


def test_a_recorded_nuscenes_bin_file_has_five_columns(data_dir):
    path, = (data_dir / 'noncommercial' / 'nuscenes_demo').glob('*LIDAR_TOP*.pcd.bin')
    points, columns = read_cloud(path)
    assert columns == XYZI
    assert len(points) == 34_688
    np.testing.assert_array_equal(points, nuscenes_points(data_dir)[:, :4])


def test_a_recorded_bin_file_without_intensity_must_be_named(data_dir):
    path = data_dir / 'noncommercial' / 'kitti_odometry_00' / '000000_xyz.bin'
    assert 'columns=' in refused(read_cloud, path)  # its size would fit 4 columns too
    points, columns = read_cloud(path, columns=XYZ)
    assert columns == XYZ
    assert len(points) == 124_668
    assert -13 < points[:, 2].min() < points[:, 2].max() < 3


@pytest.mark.parametrize('pack', [lzf_runs, lzf_copies])
@pytest.mark.parametrize('encoding', ENCODINGS)
@pytest.mark.parametrize('n', [1, 2, 300])
def test_pcd_round_trip(write, encoding, pack, n):
    values = sample(n)
    points, columns = read_cloud(write('a.pcd', pcd(values, encoding, pack)))
    assert columns == XYZI
    for index, name in enumerate(XYZI):
        np.testing.assert_array_equal(points[:, index], values[name])


def test_the_test_writer_makes_copies():
    data = b'abcabcabc' * 200 + bytes(range(256))
    assert len(lzf_copies(data)) < len(data) / 4 < len(lzf_runs(data))


def test_pcd_points_that_are_not_finite_are_read_and_then_dropped(write):
    values = sample(4)
    values['x'][1], values['z'][2] = np.nan, -np.inf
    for encoding in ENCODINGS:
        path = write('a.pcd', pcd(values, encoding))
        assert len(read_cloud(path)[0]) == 4
        cloud = as_points(path, use_intensity=False)
        assert (len(cloud.points), cloud.num_dropped, cloud.num_received) == (2, 2, 4)


def test_a_pcd_header_may_leave_out_count_viewpoint_and_points(write):
    data = ('# a comment\r\nFIELDS x y z\r\nSIZE 4 4 4\r\nTYPE F F F\r\nWIDTH 2\r\nHEIGHT 1\r\n'
            'DATA ascii\r\n1 2 3\r\n\r\n-4 nan 6')
    points, _ = read_cloud(write('a.pcd', data.encode()))
    np.testing.assert_array_equal(points, [[1, 2, 3], [-4, np.nan, 6]])


@pytest.mark.parametrize('encoding', ENCODINGS)
@pytest.mark.parametrize('replaced, part', [
    ({'WIDTH': 301}, 'POINTS 300'), ({'WIDTH': None}, 'without WIDTH'),
    ({'WIDTH': 4294967295, 'HEIGHT': 4294967295, 'POINTS': None}, 'expected'),
    ({'WIDTH': 301, 'POINTS': 301}, 'expected'), ({'WIDTH': 299, 'POINTS': 299}, 'expected'),
    ({'WIDTH': '-300'}, 'WIDTH'), ({'WIDTH': '3e2'}, 'WIDTH'), ({'WIDTH': '9' * 4000}, 'WIDTH'),
    ({'POINTS': ''}, 'POINTS'), ({'FIELDS': 'x y z'}, 'equal numbers'), ({'FIELDS': ''}, 'FIELDS'),
    ({'TYPE': 'U U F F F U F X'}, 'X2'), ({'SIZE': '4 1 4 4 4 1 8 3'}, 'I3'),
    ({'SIZE': '4 1 2 4 4 1 8 2'}, 'F2'), ({'COUNT': '1 3 1 3 1 1 1 -2'}, 'COUNT'),
    ({'FIELDS': 't _ y normal x i Z label'}, "'z'"),
    ({'FIELDS': 't _ y x x intensity z label'}, "'x'"),
    ({'COUNT': '1 3 2 3 1 1 1 2'}, "COUNT 2 for 'y'"),
    ({'COUNT': '1 4294967295 1 3 1 1 1 2'}, 'expected'), ({'NONSENSE': 1}, 'NONSENSE'),
    ({'SIZE': None}, 'without SIZE'),
])
def test_a_wrong_pcd_header_is_refused(write, encoding, replaced, part):
    path = write('a.pcd', pcd(sample(), encoding, lzf_runs, **replaced))
    tracemalloc.start()
    message = refused(read_cloud, path)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert part in message
    assert 'a.pcd' in message
    assert peak < 5e6


def test_an_unknown_pcd_encoding_is_refused(write):
    data = pcd(sample(3), 'binary').replace(b'DATA binary', b'DATA ternary')
    assert 'ternary' in refused(read_cloud, write('a.pcd', data))


@pytest.mark.parametrize('encoding', ENCODINGS)
def test_a_truncated_pcd_file_is_refused(write, encoding):
    data = pcd(sample(20), encoding)
    # The last row may lose digits unnoticed when it is text; what it ends with is a whole number.
    last = data.rstrip().rfind(b' ') if encoding == 'ascii' else len(data)
    for length in range(0, last, 7):
        refused(read_cloud, write('a.pcd', data[:length]))
    refused(read_cloud, write('a.pcd', data + b'1'))


def compressed_pcd(body: bytes) -> bytes:
    """Return two points, 80 bytes, said to be packed in ``body``."""
    header = pcd(sample(2), 'ascii').split(b'DATA')[0] + b'DATA binary_compressed\n'
    return header + struct.pack('<II', len(body), 80) + body


def test_compressed_points_may_copy_what_the_copy_itself_writes(write):
    points, _ = read_cloud(write('a.pcd', compressed_pcd(b'\0\0\xe0\x46\0')))
    np.testing.assert_array_equal(points, np.zeros((2, 4)))


@pytest.mark.parametrize('body', [
    b'\0\0\xe0\x46\5',  # from before the start
    b'\xe0\x47\0', b'\0\0\xe0\x46\1', b'\0\0\xff\x46\0',
    b'\0\0\xe0\x47\0', b'\0\0\xe0\x46\0\0\0',  # one byte too many
    b'\0\0\xe0\x45\0',  # one too few
    b'\0\0\xe0\x46', b'\0\0\xe0', b'\0', b'\5ab', b'\x1f' + b'a' * 32, b''])
def test_damaged_compressed_points_are_refused(write, body):
    refused(read_cloud, write('a.pcd', compressed_pcd(body)))


def test_compressed_points_that_claim_too_much_are_refused_before_allocation(write):
    header = pcd(sample(1), 'ascii').split(b'DATA')[0] + b'DATA binary_compressed\n'
    n = 10_000_000
    size = n * sum(int(kind[1]) * count for _, kind, count in FIELDS)
    header = header.replace(b'WIDTH 1\n', b'WIDTH %d\n' % n).replace(b'POINTS 1\n', b'')
    path = write('a.pcd', header + struct.pack('<II', 3, size) + b'\x00a\x00')
    tracemalloc.start()
    start = time.perf_counter()
    refused(read_cloud, path)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 1e6
    assert time.perf_counter() - start < 0.5


def test_numpy_files(write):
    xyzi = np.random.default_rng(0).uniform(0, 9, (20, 4)).astype(np.float32)
    wide = np.column_stack([xyzi, np.linspace(0, 1, 20)])
    record = np.zeros(20, [('intensity', 'u1'), ('z', '>f8'), ('y', 'f2'), ('x', 'i4')])
    record['x'], record['intensity'] = np.arange(20), 200
    for name, data in (('a.npy', npy(xyzi)), ('b.npz', npz(points=xyzi, other=wide)),
                       ('c.npz', npz(anything=xyzi)), ('d.npy', npy(np.asfortranarray(xyzi))),
                       ('e.npz', npz(intensity=xyzi[:, 3], **dict(zip(XYZ, xyzi.T, strict=False)),
                                     ring=np.zeros(3)))):
        points, columns = read_cloud(write(name, data))
        assert columns == XYZI
        np.testing.assert_array_equal(points, xyzi)
    points, columns = read_cloud(write('f.npy', npy(record)))
    assert columns == XYZI
    np.testing.assert_array_equal(points, [(i, 0, 0, 200) for i in range(20)])
    points, columns = read_cloud(write('g.npy', npy(wide)), columns=(*XYZ, 'ring', 'time_lag'))
    assert columns == (*XYZ, 'time_lag')
    np.testing.assert_array_equal(points, wide[:, [0, 1, 2, 4]].astype(np.float32))


@pytest.mark.parametrize('name, data, part', [
    ('a.npy', npy(np.zeros((4, 5))), '5 columns'), ('a.npy', npy(np.zeros((4, 2))), '2 columns'),
    ('a.npy', npy(np.zeros(12)), 'shape [12]'), ('a.npy', npy(np.zeros((4, 3), bool)), 'bool'),
    ('a.npy', npy(np.zeros((4, 3), complex)), 'complex'),
    ('a.npy', npy(np.zeros((4, 3)))[:-8], '88 bytes'),
    ('a.npy', npy(np.zeros((4, 3))) + b'\0', '97 bytes'), ('a.npy', b'\x93NUMPY\3\0', 'version'),
    ('a.npy', npy(np.zeros(2, [('x', 'f4'), ('y', 'f4'), ('q', 'f4')])), "'z'"),
    ('a.npy', npy(np.zeros(2, [('x', 'f4'), ('y', 'f4'), ('z', 'f4', 2)])), 'one'),
    ('a.npz', npz(a=np.zeros((2, 3)), b=np.zeros((2, 3))), "'points'"), ('a.npz', npz(), 'none'),
    ('a.npz', npz(x=np.zeros(2), y=np.zeros(2), z=np.zeros(3)), 'lengths'),
    ('a.npz', npz(points=np.zeros((9, 3)))[:-30], '.npz'),
    ('a.bin', bytes(18), '18 bytes'), ('a.pcd.bin', bytes(16), '16 bytes'),
    ('a.bin', b'', '0 bytes'), ('a.txt', b'1 2 3', '.txt'), ('a', b'', "''"),
])
def test_other_files_that_are_refused(write, name, data, part):
    assert part in refused(read_cloud, write(name, data))


def test_npy_with_objects_or_an_absurd_shape_is_refused_before_allocation(write):
    stream = io.BytesIO()
    np.save(stream, np.array([[1, 'a', None]], object), allow_pickle=True)
    assert 'object' in refused(read_cloud, write('a.npy', stream.getvalue()))
    for shape in ((10 ** 12, 3), (-1, 3), (0, 10 ** 30), (2 ** 62, 2 ** 62, 4)):
        stream = io.BytesIO()
        np.lib.format.write_array_header_1_0(
            stream, {'descr': '<f4', 'fortran_order': False, 'shape': shape})
        refused(read_cloud, write('a.npy', stream.getvalue()))


def test_an_archive_that_unpacks_to_too_much_is_refused(write, monkeypatch):
    monkeypatch.setattr('tt_perception.bevfusion.cloudfile.MAX_FILE_BYTES', 100_000)
    data = npz(points=np.zeros((50_000, 3)))
    assert len(data) < 100_000
    assert 'unpacks to' in refused(read_cloud, write('a.npz', data))
    assert '100001 bytes' in refused(read_cloud, write('a.bin', bytes(100_001)))


def test_paths_that_are_no_files_are_refused(tmp_path):
    assert 'no such file' in refused(read_cloud, tmp_path / 'missing.pcd')
    assert 'missing.bin' in refused(as_points, str(tmp_path / 'missing.bin'), use_intensity=False)
    (tmp_path / 'folder.pcd').mkdir()
    assert 'folder' in refused(read_cloud, tmp_path / 'folder.pcd')
    refused(read_cloud, '/dev/zero')
    refused(read_cloud, 'a\0.pcd')


def valid_files() -> dict[str, bytes]:
    rng = np.random.default_rng(1)
    xyzi = rng.uniform(0, 9, (5, 4)).astype(np.float32)
    files = {f'{encoding}.pcd': pcd(sample(5), encoding) for encoding in ENCODINGS}
    files |= {'a.bin': xyzi.tobytes(), 'a.pcd.bin': rng.bytes(60), 'a.npy': npy(xyzi)}
    members = {name: xyzi[:, index] for index, name in enumerate(XYZI)}
    return files | {'a.npz': npz(points=xyzi), 'b.npz': npz(**members)}


@settings(deadline=None, max_examples=400,
          suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data())
def test_any_bytes_are_read_or_refused(write, data):
    """Damage valid files, or take random bytes: nothing but InputError may come out."""
    name, content = data.draw(st.sampled_from(sorted(valid_files().items())))
    if data.draw(st.integers(0, 9)) == 0:
        content = data.draw(st.binary(max_size=300))
    else:
        content = bytearray(content)
        for _ in range(data.draw(st.integers(0, 4))):
            at = data.draw(st.integers(0, len(content) - 1))
            content[at] = data.draw(st.one_of(st.integers(0, 255), st.sampled_from(b'0919 \n')))
        content = bytes(content)[:data.draw(st.one_of(
            st.just(len(content)), st.integers(0, len(content))))]
    path = write(name, content)
    try:
        cloud = as_points(path, use_intensity=True)
    except InputError as error:
        assert '\n' not in str(error)
        assert error.reason in ('file', 'empty')
    else:
        assert cloud.points.shape == (cloud.num_received - cloud.num_dropped, 4)
        assert np.isfinite(cloud.points).all()


XYZI_ARRAY = np.arange(20, dtype=np.float32).reshape(5, 4)


@pytest.mark.parametrize('columns, use_intensity, points, lag', [
    (None, False, [0, 1, 2], None),
    (None, True, [0, 1, 2, 3], None),
    (('x', 'y', 'z', 'time_lag'), False, [0, 1, 2], 3),
    (('time_lag', 'z', 'y', 'x'), False, [3, 2, 1], 0),
    (['intensity', 'x', 'y', 'z'], True, [1, 2, 3, 0], None),
    (('x', 'y', 'z', 'ring'), False, [0, 1, 2], None),
])
def test_columns_of_plain_arrays(columns, use_intensity, points, lag):
    for array in (XYZI_ARRAY, XYZI_ARRAY.astype('>f8'), XYZI_ARRAY.astype(np.int16),
                  np.asfortranarray(XYZI_ARRAY), XYZI_ARRAY.astype(np.float16),
                  np.repeat(XYZI_ARRAY, 2, 0)[::2], XYZI_ARRAY.tolist()):
        cloud = as_points(array, use_intensity=use_intensity, columns=columns)
        assert cloud.points.dtype == np.float32
        assert cloud.points.flags.c_contiguous
        np.testing.assert_array_equal(cloud.points, XYZI_ARRAY[:, points])
        if lag is None:
            assert cloud.time_lag is None
        else:
            assert cloud.time_lag.dtype == np.float32
            np.testing.assert_array_equal(cloud.time_lag, XYZI_ARRAY[:, lag])


@pytest.mark.parametrize('source, columns, use_intensity, part', [
    (XYZI_ARRAY[:, :3], None, True, 'intensity'),
    (np.zeros((2, 5)), None, False, 'columns='),
    (np.zeros((2, 5)), XYZI, False, '5 columns and 4 names'),
    (XYZI_ARRAY, ('x', 'y', 'z', 'z'), False, "'z'"),
    (XYZI_ARRAY, ('x', 'y', 'i', 'j'), False, "'z'"),
    (XYZI_ARRAY, 'xyzi', False, 'sequence of names'),
    (XYZI_ARRAY, (1, 2, 3, 4), False, 'sequence of names'),
    (np.zeros((2, 2, 3)), None, False, 'shape [2, 2, 3]'),
    (np.float32(3), None, False, 'shape []'),
    (None, None, False, 'object'),
    (b'abc', None, False, 'type |S3'),
    ([[1, 2, 3], [4]], None, False, 'no array'),
    ({'x': [1], 'y': [2]}, None, False, "'z'"),
    ({'x': [1], 'y': [2], 'z': [[3]]}, None, False, 'lengths'),
    ({'x': [1], 'y': [2], 'z': ['3']}, None, False, 'z'),
    ({'x': [1], 'y': [2], 'z': [3]}, XYZ, False, 'names its own'),
])
def test_arrays_that_are_refused(source, columns, use_intensity, part):
    message = refused(as_points, source, use_intensity=use_intensity, columns=columns,
                      reason='layout')
    assert part in message


@pytest.mark.parametrize('empty', [np.zeros((0, 3)), np.full((4, 3), np.nan),
                                   {'x': [], 'y': [], 'z': []}, [[np.inf, 0, 0]]])
def test_no_finite_points_are_refused_as_empty(empty):
    refused(as_points, empty, use_intensity=False, reason='empty')


def test_non_finite_points_of_arrays_are_dropped_like_those_of_messages():
    points = np.repeat(XYZI_ARRAY, 2, 0)
    points[1, 0], points[4, 3], points[7, 2] = np.nan, np.inf, -np.inf
    without = as_points(points, use_intensity=False)
    assert (without.num_dropped, without.num_received) == (2, 10)
    np.testing.assert_array_equal(without.points, np.delete(points, (1, 7), 0)[:, :3])
    with_intensity = as_points(points, use_intensity=True)
    assert with_intensity.num_dropped == 3
    lagged = as_points(points, use_intensity=False, columns=(*XYZ, 'time_lag'))
    assert lagged.num_dropped == 3
    np.testing.assert_array_equal(lagged.time_lag, np.delete(points, (1, 4, 7), 0)[:, 3])
    assert as_points([[1e39, 0, 0], [1, 2, 3]], use_intensity=False).num_dropped == 1


def test_the_result_is_a_copy():
    points = np.ones((4, 3), np.float32)
    cloud = as_points(points, use_intensity=False)
    points[:] = 9
    assert (cloud.points == 1).all()
    points.flags.writeable = False
    assert len(as_points(points, use_intensity=False).points) == 4


def test_structured_arrays_and_mappings_name_their_columns():
    record = np.zeros((2, 3), [('t', 'f8'), ('z', '>i2'), ('y', 'f4'), ('x', 'f8'),
                               ('intensity', 'u1'), ('time_lag', 'f4')])
    for index, name in enumerate(record.dtype.names):
        record[name] = np.arange(6).reshape(2, 3) + 10 * index
    expected = [[30 + i, 20 + i, 10 + i, 40 + i] for i in range(6)]
    columns = {name: record[name].reshape(-1) for name in record.dtype.names}
    for source in (record, columns):
        cloud = as_points(source, use_intensity=True)
        np.testing.assert_array_equal(cloud.points, expected)
        np.testing.assert_array_equal(cloud.time_lag, np.arange(6) + 50)


def test_tensors():
    torch = pytest.importorskip('torch')
    tensor = torch.from_numpy(XYZI_ARRAY)
    for source in (tensor, tensor.double(), tensor.T.contiguous().T, tensor.bfloat16(),
                   tensor.clone().requires_grad_(), tensor.to(torch.int32)):
        cloud = as_points(source, use_intensity=True)
        np.testing.assert_array_equal(cloud.points, XYZI_ARRAY)
    mapping = {name: tensor[:, index] for index, name in enumerate(XYZI)}
    np.testing.assert_array_equal(as_points(mapping, use_intensity=True).points, XYZI_ARRAY)
    refused(as_points, tensor.bool(), use_intensity=False, reason='layout')
    refused(as_points, tensor.to_sparse(), use_intensity=False, reason='layout')


def test_encrypted_or_odd_archives_are_refused(write):
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, 'w') as archive:
        archive.writestr('points.npy', 'no array')
    assert '.npy' in refused(read_cloud, write('a.npz', stream.getvalue()))
    data = bytearray(npz(points=np.zeros((3, 3))))
    for signature, place in ((b'PK\3\4', 6), (b'PK\1\2', 8)):
        data[data.index(signature) + place] |= 1  # the bit that says encrypted
    refused(read_cloud, write('a.npz', bytes(data)))


def test_masked_values_are_dropped_like_nan():
    mask = np.zeros((5, 4), bool)
    mask[1, 0] = mask[3, 2] = mask[4, 3] = True
    for dtype in (np.float32, '>f8', np.int16):
        masked = np.ma.MaskedArray(XYZI_ARRAY.astype(dtype), mask)
        cloud = as_points(masked, use_intensity=False)
        np.testing.assert_array_equal(cloud.points, np.delete(XYZI_ARRAY, (1, 3), 0)[:, :3])
        assert (cloud.num_dropped, cloud.num_received) == (2, 5)
        assert as_points(masked, use_intensity=True).num_dropped == 3
        columns = {name: masked[:, index] for index, name in enumerate(XYZI)}
        assert as_points(columns, use_intensity=True).num_dropped == 3
    record = np.ma.zeros(5, [(name, 'f4') for name in XYZI])
    for index, name in enumerate(XYZI):
        record[name] = np.ma.MaskedArray(XYZI_ARRAY[:, index], mask[:, index])
    assert as_points(record, use_intensity=True).num_dropped == 3
    refused(as_points, np.ma.masked_all((4, 3)), use_intensity=False, reason='empty')


@pytest.mark.parametrize('columns', [5, (), b'xyzi', [None] * 4, np.array(3), {1: 2}])
def test_columns_that_are_no_names_are_refused(write, columns):
    for source, reason in ((XYZI_ARRAY, 'layout'), (write('a.bin', bytes(32)), 'file')):
        message = refused(as_points, source, use_intensity=False, columns=columns, reason=reason)
        assert 'expected a sequence of names' in message
    refused(as_points, {'x': [1], 'y': [2], 'z': [3]}, use_intensity=False, columns=5,
            reason='layout')


def test_too_many_points_are_refused_before_they_are_copied():
    torch = pytest.importorskip('torch')
    count = 10 ** 12
    record = np.zeros((), [(name, 'f4') for name in XYZ])
    column = np.broadcast_to(np.float32(0), count)
    expected = f'found {count} points, expected at most {MAX_POINTS}'
    tracemalloc.start()
    for source in (np.broadcast_to(np.float32(0), (count, 3)), np.broadcast_to(record, count),
                   np.broadcast_to(record, (10 ** 6, 10 ** 6)), dict.fromkeys(XYZ, column),
                   torch.zeros((1, 3)).expand(count, 3),
                   torch.zeros((1, 3), dtype=torch.bfloat16).expand(count, 3)):
        assert expected in refused(as_points, source, use_intensity=False, reason='layout')
    assert tracemalloc.get_traced_memory()[1] < 1_000_000
    tracemalloc.stop()


def test_too_many_points_of_a_file_are_refused(write, monkeypatch):
    monkeypatch.setattr('tt_perception.bevfusion.cloudfile.MAX_POINTS', 4)
    for path in (write('a.bin', bytes(5 * 16)), write('a.npz', npz(points=XYZI_ARRAY))):
        for call in (read_cloud, lambda p: as_points(p, use_intensity=False)):
            assert 'found 5 points, expected at most 4' in refused(call, path)


class Odd:
    """Raises what it is told to when it is used as an array or as a path."""

    def __init__(self, error):
        self.error = error

    def __array__(self, *args, **kwargs):
        raise self.error


class OddPath(Odd):
    def __fspath__(self):
        if isinstance(self.error, bytes):
            return self.error
        raise self.error


@pytest.mark.parametrize('error', [OSError('a\nb'), KeyError('a'), ZeroDivisionError(),
                                   RecursionError('deep'), MemoryError()])
def test_sources_that_raise_are_refused(error):
    message = refused(as_points, Odd(error), use_intensity=False, reason='layout')
    assert message.startswith('points: found a Odd that is no array')
    refused(as_points, dict.fromkeys(XYZ, Odd(error)), use_intensity=False, reason='layout')
    for source in (OddPath(error), OddPath(b'bytes')):
        for call in (read_cloud, lambda p: as_points(p, use_intensity=False)):
            assert 'points: found a OddPath that is no path' in refused(call, source)


def test_paths_that_no_file_can_have_are_refused():
    for path in ('a' * 5_000 + '.pcd', 'a\0.pcd', '\ud800.pcd'):
        refused(as_points, path, use_intensity=False)


def test_truth_values_are_no_shape(write):
    header = "{'descr': '<f4', 'fortran_order': False, 'shape': (True, 3), }"
    header += ' ' * (-(len(header) + 11) % 64) + '\n'
    raw = b'\x93NUMPY\x01\x00' + struct.pack('<H', len(header)) + header.encode() + bytes(12)
    assert 'shape [True, 3]' in refused(read_cloud, write('a.npy', raw))


@pytest.mark.parametrize('data', [b'ascii\n', b'binary\n', b'binary_compressed\n' + bytes(8)])
def test_a_pcd_file_without_points_says_so(write, data):
    path = write('a.pcd', b'FIELDS x y z\nSIZE 4 4 4\nTYPE F F F\nWIDTH 0\nHEIGHT 1\nDATA '
                 + data)
    assert read_cloud(path)[0].shape == (0, 3)
    assert 'found 0 points' in refused(as_points, path, use_intensity=False, reason='empty')
