# SPDX-License-Identifier: Apache-2.0
"""How much responses repeat themselves, and what stage 1 would propose to share; needs no model."""
