# SPDX-License-Identifier: Apache-2.0
"""Evaluation tools and test models of sglang-reasoncache."""
