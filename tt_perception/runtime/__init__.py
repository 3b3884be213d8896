# SPDX-License-Identifier: Apache-2.0
"""What every model of the package stands on; nothing in here knows a model."""
