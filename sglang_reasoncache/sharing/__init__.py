# SPDX-License-Identifier: Apache-2.0
"""From proposed block pairs to redirected rows: measure, accept, redirect, count."""
