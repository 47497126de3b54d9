# SPDX-License-Identifier: Apache-2.0
"""How much responses repeat themselves, and what stage 1 would propose to share.

Reads any JSONL of responses and needs no model; see ``python -m eval.redundancy -h``.
"""
