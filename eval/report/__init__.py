# SPDX-License-Identifier: Apache-2.0
"""Shows run folders as tables and pictures: ``python -m eval.report RUN...``."""
