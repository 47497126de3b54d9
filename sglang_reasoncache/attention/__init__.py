# SPDX-License-Identifier: Apache-2.0
"""Reading shared slots: keys are rotated from their home position to where they are used."""
