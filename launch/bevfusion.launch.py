# SPDX-License-Identifier: Apache-2.0
"""Start the lidar node, and configure and activate it by events."""

from launch import LaunchDescription
from launch.actions import DeclareLaunchArgument, EmitEvent, RegisterEventHandler
from launch.conditions import IfCondition
from launch.event_handlers import OnProcessStart
from launch.events import matches_action
from launch.substitutions import EnvironmentVariable, LaunchConfiguration, PathJoinSubstitution
from launch_ros.actions import LifecycleNode
from launch_ros.event_handlers import OnStateTransition
from launch_ros.events.lifecycle import ChangeState
from launch_ros.parameter_descriptions import ParameterFile, ParameterValue
from launch_ros.substitutions import FindPackageShare
from lifecycle_msgs.msg import Transition


def _config(file_name):
    return PathJoinSubstitution([FindPackageShare('tt_perception'), 'config', file_name])


ARGUMENTS = (  # name, default, description
    ('input/pointcloud', '/sensing/lidar/concatenated/pointcloud', 'sensor_msgs/PointCloud2'),
    ('output/objects', 'objects', 'autoware_perception_msgs/DetectedObjects'),
    ('data_path', PathJoinSubstitution([EnvironmentVariable('HOME'), 'autoware_data']),
     'folder of all artifacts'),
    ('model_path', PathJoinSubstitution([LaunchConfiguration('data_path'), 'bevfusion']),
     "folder of the artifact; '' for the pinned release from the cache or the Hub"),
    ('model_param_path', _config('bevfusion_lidar.param.yaml'), 'parameter file of the node'),
    ('common_param_path', _config('common_bevfusion.param.yaml'), 'parameter file, diagnostics'),
    ('backend', 'auto', 'where the network runs: auto, tt or cpu'),
    ('device_id', '0', 'which card; backend tt'),
    ('autostart', 'true', 'configure and activate; false leaves that to a lifecycle manager'),
    ('build_only', 'false', 'prepare the model and end'),
    ('use_sim_time', 'false', 'take the time from /clock'),
    ('log_level', 'info', 'least severity of what is logged'),
)


def generate_launch_description():
    """Return the description; the node is activated each time it has been configured."""
    node = LifecycleNode(
        package='tt_perception', executable='bevfusion_node', name='bevfusion', namespace='',
        output='screen',
        parameters=[
            ParameterFile(LaunchConfiguration('model_param_path'), allow_substs=True),
            ParameterFile(LaunchConfiguration('common_param_path'), allow_substs=True),
            {name: ParameterValue(LaunchConfiguration(name), value_type=kind)
             for name, kind in (('model_path', str), ('backend', str), ('device_id', int),
                                ('build_only', bool), ('use_sim_time', bool))},
        ],
        remappings=[('~/' + name, LaunchConfiguration(name))
                    for name in ('input/pointcloud', 'output/objects')],
        arguments=['--ros-args', '--log-level', LaunchConfiguration('log_level')])

    def request(transition):
        return EmitEvent(event=ChangeState(lifecycle_node_matcher=matches_action(node),
                                           transition_id=transition))

    wants_start = IfCondition(LaunchConfiguration('autostart'))
    return LaunchDescription([
        *(DeclareLaunchArgument(name, default_value=default, description=description)
          for name, default, description in ARGUMENTS),
        # The handlers come before the node, so that they miss none of its events.
        RegisterEventHandler(OnProcessStart(
            target_action=node,
            on_start=[request(Transition.TRANSITION_CONFIGURE)]), condition=wants_start),
        RegisterEventHandler(OnStateTransition(
            target_lifecycle_node=node, start_state='configuring', goal_state='inactive',
            entities=[request(Transition.TRANSITION_ACTIVATE)]), condition=wants_start),
        node,
    ])
