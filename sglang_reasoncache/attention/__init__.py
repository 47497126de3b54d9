# SPDX-License-Identifier: Apache-2.0
"""Reading shared slots: keys are rotated from their cached position to where they are used."""
