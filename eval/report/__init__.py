# SPDX-License-Identifier: Apache-2.0
"""Shows the results of ``eval.run`` as tables and pictures: ``python -m eval.report RUN...``."""
