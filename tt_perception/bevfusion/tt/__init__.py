# SPDX-License-Identifier: Apache-2.0
"""BEVFusion-L as ttnn graphs for one Blackhole p150."""
