# SPDX-License-Identifier: Apache-2.0
"""Problems and graders: what a served model is asked."""
