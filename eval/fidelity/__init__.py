# SPDX-License-Identifier: Apache-2.0
"""What sharing and eviction cost a language model on recorded responses; see docs/fidelity.md."""
