# SPDX-License-Identifier: Apache-2.0
"""From proposals to redirected rows: measure, accept, apply, count."""
