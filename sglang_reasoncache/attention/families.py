# SPDX-License-Identifier: Apache-2.0
"""The families of models in the table of docs/index.md, and which of them are served."""

from typing import NamedTuple

#: Kind of attention -> reason why the server refuses the model or shares nothing.
REFUSED = {
    "other windows": "nothing shared: rotations unknown",
    "latent, lightning": "nothing shared: lightning layers have a rotary embedding of their own",
    "sparse": "nothing shared: index keys, which choose what is read, are not rotated with the others",
}


class Family(NamedTuple):
    """A row of the table in docs/index.md. ``tried``: which models were run, on which device."""

    models: str
    attention: str
    tried: str

    @property
    def answer(self) -> str:
        """``served``, or why not."""
        return REFUSED.get(self.attention, "served")


#: Rows of the table in docs/index.md. ``attention``: a key of ``REFUSED``, or attention that is served.
FAMILIES = (
    Family(
        "Llama, Qwen2, Qwen3, Mistral and others", "full", "two small ones: CPU; an 8B shape: H100"
    ),
    Family("Qwen3-Next, Qwen3.5 without images", "full, gated delta net", "tiny ones: CPU"),
    Family("LFM2", "full, short convolution", "tiny: CPU"),
    Family("Nemotron-H", "full without positions, Mamba 2", "tiny: CPU"),
    Family("Granite-H", "full without positions, Mamba 2", "tiny: CPU"),
    Family("Falcon-H1", "full, Mamba 2", "tiny: CPU"),
    Family("DeepSeek-R1, V2 and V3, Kimi-K2, GLM-4.7-Flash", "latent", "tiny V2, V3 (TP 2): CPU"),
    Family("Kimi-Linear", "latent without positions, Kimi delta", "tiny: CPU"),
    Family("Ring", "latent, lightning", ""),
    Family("DeepSeek-V3.2, GLM-5", "sparse", ""),
    Family("Gemma 2 and 3, EXAONE 4, OLMo 3", "full, windows", "tiny Gemma 3 and OLMo 3: CPU"),
    Family("Mellum 2, gpt-oss", "full, windows in their own pool", "tiny ones: CPU"),
    Family("Gemma 4, MiMo-V2, Step-3.5, Llama 4", "other windows", ""),
)
