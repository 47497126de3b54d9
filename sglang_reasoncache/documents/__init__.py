# SPDX-License-Identifier: Apache-2.0
"""Prompts made of documents that were prefilled before, each read wherever the prompt has it."""
