# SPDX-License-Identifier: Apache-2.0
"""The families of models in the table of docs/index.md, and which of them are served."""

from typing import NamedTuple

#: Kind of latent attention whose rows are the latent part alone (``qk_rope_head_dim`` 0).
WITHOUT_ROTATED = "latent without rotated dims, Kimi delta"
#: Kind of attention -> reason why the server refuses the model or shares nothing.
REFUSED = {
    "full, windows, heads of 512 dims": "nothing shared: our kernels spill registers at 512 dims",
    "full, chunks": "nothing shared: our kernels know windows, not chunks",
    WITHOUT_ROTATED: "nothing shared: our kernels need rotated dims behind the latent ones",
    "full, by a way of its own": "nothing shared: the model writes or reads KV itself",
    "latent, sinks": "nothing shared: our kernels have no sinks over latent rows",
    "sparse": "nothing shared: index keys, which choose what is read, are not rotated with the others",
    "sparse, own pool": "nothing shared: SGLang keeps their KV in pools of another layout",
    "full, LongRoPE": "served with `--context-length 4096`: longer requests have other angles",
    "full, keys scaled once rotated": "nothing shared: such keys cannot be rotated again",
    "by Hugging Face's code": "nothing shared: rotations unknown",
}


class Family(NamedTuple):
    """A row of the table in docs/index.md. ``tried``: which models were run, on which device. ``modules``:
    SGLang's classes that decide: ``module.Class`` of ``sglang.srt.models``, or a rotary embedding."""

    models: str
    attention: str
    tried: str
    modules: tuple[str, ...]

    @property
    def answer(self) -> str:
        """``served``, or why not."""
        return REFUSED.get(self.attention, "served")


#: Rows of the table in docs/index.md. ``attention``: a key of ``REFUSED``, or attention that is served.
FAMILIES = (
    Family(
        "Llama, Qwen2, Qwen3, Mistral and others",
        "full",
        "two small ones: CPU; an 8B shape: H100",
        ("llama.LlamaAttention", "qwen2.Qwen2Attention", "qwen3.Qwen3Attention"),
    ),
    Family(
        "GLM-4.5, 4.6 and 4.7, MiniMax-M2, Step3, HY3, Apertus",
        "full",
        "",
        (
            "glm4_moe.Glm4MoeAttention",
            "minimax_m2.MiniMaxM2Attention",
            "step3_vl.Step3TextAttention",
            "hunyuan_v3.HYV3Attention",
            "apertus.ApertusAttention",
        ),
    ),
    Family(
        "Qwen3-Next, Qwen3.5 without images",
        "full, gated delta net",
        "tiny ones: CPU",
        (
            "qwen3_next.Qwen3HybridAttentionDecoderLayer",
            "qwen3_5.Qwen3_5AttentionDecoderLayer",
        ),
    ),
    Family(
        "Qwen-VL (Qwen3-VL on an H100: with `--attention-backend fa3`), ERNIE-VL and Ming",
        "full",
        "",
        (
            "qwen2.Qwen2Attention",
            "qwen3.Qwen3Attention",
            "ernie45_moe_vl.Ernie4_5_VLMoeAttention",
            "bailing_moe.BailingMoEAttention",
        ),
    ),
    Family("LFM2", "full, short convolution", "tiny: CPU", ("lfm2.Lfm2Attention",)),
    Family(
        "Nemotron-H",
        "full without positions, Mamba 2",
        "tiny: CPU",
        ("nemotron_h.NemotronHAttention",),
    ),
    Family(
        "Granite-H",
        "full without positions, Mamba 2",
        "tiny: CPU",
        ("granitemoehybrid.GraniteMoeHybridAttention",),
    ),
    Family(
        "MiniCPM-SALA over `--attention-backend fa3`, `flashinfer` or `triton`",
        "full without positions, lightning",
        "",
        ("minicpm.MiniCPMAttention",),
    ),
    Family(
        "Falcon-H1",
        "full, Mamba 2",
        "tiny: CPU",
        ("falcon_h1.FalconH1HybridAttentionDecoderLayer",),
    ),
    Family(
        "DeepSeek-R1, V2 and V3, Kimi-K2, GLM-4.7-Flash",
        "latent",
        "tiny V2, V3 (TP 2): CPU",
        ("deepseek_v2.DeepseekV2AttentionMLA",),
    ),
    Family("LongCat-Flash", "latent", "", ("deepseek_v2.DeepseekV2AttentionMLA",)),
    Family(
        "Kimi-Linear",
        "latent without positions, Kimi delta",
        "tiny: CPU",
        ("deepseek_v2.DeepseekV2AttentionMLA",),
    ),
    Family(
        "Kimi-K3",
        "latent without positions, Kimi delta",
        "",
        ("kimi_k3.KimiK3MLAAttention",),
    ),
    Family("Ling 3 with `use_mla_nope`", WITHOUT_ROTATED, "", ("bailing_moe_v3.DsV3MLA",)),
    Family("Ling 3", "latent, Kimi delta", "", ("bailing_moe_v3.DsV3MLA",)),
    Family("Ring and Ling 2.5", "latent, lightning", "", ("bailing_moe_linear.DsV3MLA",)),
    Family("Hunyuan 4 without an index", "latent, sinks", "", ("hunyuan_v4.HYV4Attention",)),
    Family("DeepSeek-V3.2, GLM-5", "sparse", "", ("deepseek_v2.DeepseekV2AttentionMLA",)),
    Family(
        "DeepSeek-V4, MiniMax-M3",
        "sparse, own pool",
        "",
        ("deepseek_v4.MQALayer", "minimax_m3.MiniMaxM3Attention"),
    ),
    Family(
        "Gemma 2 and 3, EXAONE 4, K-EXAONE, OLMo 3, Command R and A, Trinity",
        "full, windows",
        "tiny Gemma 3, OLMo 3, K-EXAONE, Command A, Trinity: CPU",
        (
            "gemma2.Gemma2Attention",
            "gemma3_causal.Gemma3Attention",
            "exaone4.Exaone4Attention",
            "exaone_moe.ExaoneMoEAttention",
            "olmo2.Olmo2Attention",
            "commandr.CohereAttention",
            "cohere2_moe.Cohere2MoeAttention",
            "afmoe.AfmoeAttention",
        ),
    ),
    Family(
        "Mellum 2, gpt-oss, MiMo-V2-Flash, Step-3.5, Laguna, Spark 2.5",
        "full, windows in their own pool",
        "tiny ones, not Step-3.5 or Spark 2.5: CPU",
        (
            "mellum.MellumAttention",
            "gpt_oss.GptOssAttention",
            "mimo_v2.MiMoV2Attention",
            "step3p5.Step3p5Attention",
            "laguna.LagunaAttention",
            "spark2_5.Spark2_5Attention",
        ),
    ),
    Family(
        "Jet-Nemotron",
        "full, windows, gated delta net",
        "",
        ("jet_nemotron.JetNemotronAttention",),
    ),
    Family(
        "Gemma 4",
        "full, windows, heads of 512 dims",
        "",
        ("gemma4_causal.Gemma4Attention",),
    ),
    Family(
        "Muse Spark, Inkling",
        "full, by a way of its own",
        "",
        ("inkling_common/attn.InklingAttention",),
    ),
    Family("Llama 4", "full, chunks", "", ("llama4.Llama4Attention",)),
    Family("Phi-4-mini", "full, LongRoPE", "tiny: CPU", ("Phi3LongRoPEScaledRotaryEmbedding",)),
    Family("Hunyuan-A13B", "full, keys scaled once rotated", "", ("hunyuan.HunYuanAttention",)),
    Family(
        "Seed-OSS, dots.llm1, SmolLM3 and others of SGLang's Transformers fallback",
        "by Hugging Face's code",
        "",
        ("transformers.TransformersBase",),
    ),
)
