# SPDX-License-Identifier: Apache-2.0
"""What runs say: pure functions over their records."""
