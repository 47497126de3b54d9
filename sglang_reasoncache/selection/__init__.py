# SPDX-License-Identifier: Apache-2.0
"""Reading fewer pages in a decode step; nothing is freed."""
