# SPDX-License-Identifier: Apache-2.0
"""What an evaluation leaves on disk, and how to read it."""
