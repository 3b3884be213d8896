# SPDX-License-Identifier: Apache-2.0
"""The ROS 2 side: the only folder that imports rclpy."""
