# SPDX-License-Identifier: Apache-2.0
"""BEVFusion-L, Autoware's lidar detector."""
