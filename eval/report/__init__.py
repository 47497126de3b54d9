# SPDX-License-Identifier: Apache-2.0
"""Run folders as tables and pictures: ``python -m eval.report RUN...``."""
