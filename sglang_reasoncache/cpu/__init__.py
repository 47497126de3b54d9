# SPDX-License-Identifier: Apache-2.0
"""A server without a GPU: an SGLang platform, and the attention backend that runs on it."""
