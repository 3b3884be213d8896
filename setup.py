# SPDX-License-Identifier: Apache-2.0
"""Description of the package for colcon and pip."""

import re
import sys
from pathlib import Path

from setuptools import find_packages, setup

NAME = 'tt_perception'
HERE = Path(__file__).resolve().parent
VERSION = re.search(r"^__version__ = '([^']+)'", (HERE / NAME / '__init__.py').read_text(),
                    re.MULTILINE).group(1)


def shared_files():
    """Return what belongs under share/, as pairs of a target folder and its files."""
    share = f'share/{NAME}'
    folders = [(f'{share}/{folder}', sorted(str(path.relative_to(HERE))
                                            for path in (HERE / folder).iterdir()
                                            if path.is_file()))
               for folder in ('config', 'launch')]
    return [('share/ament_index/resource_index/packages', [f'resource/{NAME}']),
            (share, ['package.xml']), *folders]


setup(
    name=NAME,
    version=VERSION,
    description="Autoware's lidar detector BEVFusion-L for Tenstorrent cards, with a CPU backend",
    license='Apache-2.0',
    packages=find_packages(include=[NAME, f'{NAME}.*']),
    package_data={f'{NAME}.runtime': ['mock_p150/*'], f'{NAME}.bevfusion.tt': ['kernels/*']},
    # In an editable installation these are read from the checkout: copies would go stale.
    data_files=[] if 'editable_wheel' in sys.argv else shared_files(),
    zip_safe=False,
    python_requires='>=3.10',
    # Exact versions, as tested, are in requirements/. Here is only what the package cannot do
    # without, and what PyPI has: ROS comes from a distribution, or from the extra `ros`.
    install_requires=[
        'huggingface_hub',  # the released weights
        'numba>=0.60',  # per-point and per-voxel kernels
        "numpy>=1.24,<2; python_version < '3.13'",  # arrays everywhere; ttnn refuses NumPy 2
        "numpy; python_version >= '3.13'",  # no NumPy 1 exists there, and no ttnn either
        'onnx>=1.16',  # the artifact is an ONNX file
        'pyyaml',  # parameter files
        'torch>=2.9',  # the network of backend `cpu`
    ],
    extras_require={
        'bags': ['rosbags==0.11.9'],  # replay and the demo's recording, without ROS's own tools
        'plot': ['matplotlib'],  # bird's-eye pictures
        'ros': [  # a machine without a ROS distribution; needs interfaces/ built as well
            'ros-rclpy[fastrtps]==9.1.2',
            'ros-diagnostic-msgs==5.5.1',
            'ros-lifecycle-msgs==2.3.0',
            'ros-sensor-msgs==5.5.1',
        ],
        'tt': ['ttnn==0.81.1'],  # backend `tt`; Python 3.10 and 3.12 only
        'test': ['hypothesis', 'pytest<9'],  # launch_testing's plugin stops pytest 9
    },
    entry_points={
        'console_scripts': [
            'tt_perception = tt_perception.cli:main',
            'bevfusion_node = tt_perception.ros.bevfusion_node:main',
        ],
    },
)
