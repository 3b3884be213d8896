# SPDX-License-Identifier: Apache-2.0
"""A simulated street and spinning lidars."""
