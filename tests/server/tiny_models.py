# SPDX-License-Identifier: Apache-2.0
"""Models with 0.1 to 0.5 M random parameters, one for each kind of model that tests serve besides the embedded
reasoner (``eval/tiny_reasoner``), whose tokenizer they have. Their greedy responses soon repeat themselves."""

import json
import shutil
from pathlib import Path
from typing import Any

#: An EAGLE3 head for the embedded reasoner.
EAGLE3 = "eagle3"
#: An EAGLE3 head for the tiny gpt-oss, which must be there.
EAGLE3_OF_WINDOWS = "eagle3-gpt_oss"
_LINEAR = "linear_attention"
_FULL = "full_attention"
Fields = dict[str, Any]
#: Default sizes; a model in ``MODELS`` may set others. ``vocab_size`` is the embedded reasoner's.
_COMMON: Fields = dict(vocab_size=192, hidden_size=64, intermediate_size=128, num_attention_heads=4)
_COMMON |= dict(num_key_value_heads=2, max_position_embeddings=4096, tie_word_embeddings=False)
_COMMON |= dict(pad_token_id=0, eos_token_id=1, bos_token_id=None)
_HYBRID: Fields = dict(num_hidden_layers=4, layer_types=[_LINEAR, _FULL] * 2)
#: 3 value heads per key head: with 1, 2 or 4, SGLang would split projections in Triton, which needs a GPU.
_GATED_DELTA: Fields = dict(head_dim=32, full_attention_interval=2, linear_num_value_heads=3)
_GATED_DELTA |= dict(linear_key_head_dim=16, linear_value_head_dim=16, linear_num_key_heads=1)
_EXPERTS: Fields = dict(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16)
_MAMBA: Fields = dict(
    head_dim=32, mamba_num_heads=4, mamba_head_dim=32, ssm_state_size=16, n_groups=2, chunk_size=64
)
_MAMBA_2: Fields = dict(
    mamba_n_heads=4, mamba_d_head=32, mamba_d_state=16, mamba_n_groups=1, mamba_chunk_size=64
)
_LATENT: Fields = dict(num_key_value_heads=4, q_lora_rank=None, kv_lora_rank=32)
_LATENT |= dict(qk_rope_head_dim=16, qk_nope_head_dim=16, v_head_dim=16)
#: On a CPU, SGLang runs DeepSeek models only with YaRN rotary embedding. Only V3 sets ``q_lora_rank``.
_YARN: Fields = dict(rope_type="yarn", rope_theta=1e4, factor=2.0, mscale=1.0, mscale_all_dim=0.5)
_YARN |= dict(original_max_position_embeddings=2048, beta_fast=32, beta_slow=1)
_DEEPSEEK: Fields = dict(
    _LATENT, num_hidden_layers=3, rope_parameters=_YARN, first_k_dense_replace=1
)
_DEEPSEEK |= dict(n_routed_experts=4, n_shared_experts=1, num_experts_per_tok=2, n_group=1)
_DEEPSEEK |= dict(moe_intermediate_size=16, routed_scaling_factor=1.0, topk_group=1)
#: The number of layers that draft tokens (multi-token prediction), in the configurations that name it.
_MTP = "num_nextn_predict_layers"
#: Models with a layer of multi-token prediction -> names of that layer, behind ``{}`` layers: its weights, the
#: norms of the newest token's embedding and of the last output, what joins both, the norm of its output.
_DEEPSEEK_DRAFTS = tuple(
    f"model.layers.{{}}.{name}" for name in ("", "enorm", "hnorm", "eh_proj", "shared_head.norm")
)
_QWEN_DRAFTS = tuple(
    f"mtp.{name}"
    for name in ("layers.0.", "pre_fc_norm_embedding", "pre_fc_norm_hidden", "fc", "norm")
)
_MIMO_DRAFTS = tuple(
    f"model.mtp.layers.{{}}.{name}" for name in ("", "enorm", "hnorm", "eh_proj", "final_layernorm")
)
#: How many such layers MiMo has: each drafts one token.
_MIMO_LAYERS = 3
_DRAFTING = {"deepseek_v3": _DEEPSEEK_DRAFTS} | dict.fromkeys(
    ("qwen3_5_text", "qwen3_next"), _QWEN_DRAFTS
)
#: Every second layer sees all positions, the others a window. OLMo 3 has the rope fields of real checkpoints.
_WINDOW: Fields = dict(num_hidden_layers=4, head_dim=16, sliding_window=48)
_WINDOW |= dict(layer_types=["sliding_attention", _FULL] * 2)
_ROPE: Fields = dict(
    full_attention=dict(rope_type="default", rope_theta=1e4, partial_rotary_factor=0.5),
    sliding_attention=dict(rope_type="default", rope_theta=1e3, partial_rotary_factor=1.0),
)
_DENSE = ["dense"] * 4
#: Names of weights that compute what a layer adds to its input. The factors below shrink these weights,
#: so that responses repeat themselves. The factors in ``_LESS`` also apply to the weights of experts.
_OUTPUTS = tuple(
    f"{name}.weight" for name in ("o_proj", "out_proj", "down_proj", "w2", "output_linear")
)
_NORMS = tuple(f"post_{name}_layernorm.weight" for name in ("attention", "feedforward", "mlp"))
_LESS = {
    **dict.fromkeys(("deepseek_v2", "deepseek_v3", "granitemoehybrid", "kimi_linear"), 0.06),
    **dict.fromkeys(("cohere2", "cohere2_moe"), 0.01),
    "falcon_h1": 0.03,
    "afmoe": 0.4,
    "gpt_oss": 0.05,
}
_LESS_OF_OTHERS = 0.12
_LESS_OF_GEMMA = 0.6
#: Greedy responses of these models run in circles of this many tokens, so that repeats begin at other places of
#: a page: after token ``t`` the likeliest token is ``t + 1``, or ``t - 42`` at the end of a circle.
_CIRCLES = dict.fromkeys(("qwen3", "afmoe", "laguna", "mimo_v2_flash", "phi3"), 43)
_CIRCLES["exaone_moe"] = 48
#: A window that is wider than a circle and the age at which blocks share, so that shared keys are read in it.
_WIDE = {**_WINDOW, "sliding_window": 96}
#: Model name -> name of the configuration class in ``transformers``, and arguments of this class.
MODELS: dict[str, tuple[str, Fields]] = {
    "qwen3_next": (
        "Qwen3NextConfig",
        dict(**_HYBRID, **_GATED_DELTA, **_EXPERTS, shared_expert_intermediate_size=16),
    ),
    "qwen3_5_text": ("Qwen3_5TextConfig", dict(**_HYBRID, **_GATED_DELTA)),
    "lfm2": (
        "Lfm2Config",
        dict(num_hidden_layers=4, block_auto_adjust_ff_dim=False, layer_types=["conv", _FULL] * 2),
    ),
    "gemma3_text": (
        "Gemma3TextConfig",
        dict(
            **_WINDOW,
            tie_word_embeddings=True,
            query_pre_attn_scalar=16,
            rope_parameters=dict(
                full_attention=dict(rope_type="linear", factor=2.0, rope_theta=1e4),
                sliding_attention=dict(rope_type="default", rope_theta=1e3),
            ),
        ),
    ),
    "olmo3": (
        "Olmo3Config",
        dict(
            **_WINDOW,
            rope_theta=5e5,
            rope_scaling=dict(rope_type="yarn", factor=2.0, original_max_position_embeddings=2048),
        ),
    ),
    "mellum": (
        "MellumConfig",
        dict(
            **{**_WINDOW, "sliding_window": 32},
            mlp_layer_types=["dense"] * 4,
            rope_parameters=dict(
                full_attention=dict(rope_type="default", rope_theta=1e4),
                sliding_attention=dict(rope_type="default", rope_theta=1e3),
            ),
        ),
    ),
    "gpt_oss": (
        "GptOssConfig",
        dict(
            **{**_WINDOW, "sliding_window": 32},
            attention_bias=True,
            num_local_experts=4,
            num_experts_per_tok=2,
            rope_parameters=dict(
                rope_type="yarn",
                rope_theta=1.5e5,
                factor=2.0,
                original_max_position_embeddings=2048,
                beta_fast=32.0,
                beta_slow=1.0,
                truncate=False,
            ),
        ),
    ),
    # Command A: full layers have no positions. Embeddings are tied.
    "cohere2": (
        "Cohere2Config",
        dict(**_WINDOW, tie_word_embeddings=True, logit_scale=1.0, rope_theta=1e3),
    ),
    "cohere2_moe": (
        "Cohere2MoeConfig",
        {**_WINDOW, "layer_types": [_FULL, "sliding_attention"] * 2}
        | dict(first_k_dense_replace=1, tie_word_embeddings=True, logit_scale=1.0, rope_theta=1e3)
        | dict(num_experts=4, num_experts_per_tok=2, prefix_dense_intermediate_size=32),
    ),
    # K-EXAONE and Trinity: full layers have no positions.
    "exaone_moe": (
        "ExaoneMoeConfig",
        # With a pattern SGLang accepts only attention backends from a list of names.
        dict(**_WIDE, mlp_layer_types=_DENSE, rope_theta=1e6, sliding_window_pattern=None),
    ),
    "afmoe": (
        "AfmoeConfig",
        dict(**_WIDE, num_dense_layers=4, rope_theta=1e3, **_EXPERTS),
    ),
    "laguna": (
        "LagunaConfig",
        {**_WINDOW, "sliding_window": 32}
        | dict(
            mlp_layer_types=_DENSE, rope_parameters=_ROPE, num_attention_heads_per_layer=[4, 2] * 2
        ),
    ),
    # Keys are wider than values, window layers have sinks and twice as many KV heads.
    "mimo_v2_flash": (
        "MiMoV2FlashConfig",
        {**_WINDOW, "sliding_window": 32}
        | dict(head_dim=32, v_head_dim=16, mlp_layer_types=_DENSE, num_key_value_heads=1),
    ),
    # LongRoPE, served up to its shorter table.
    "phi3": (
        "Phi3Config",
        dict(
            num_hidden_layers=4,
            max_position_embeddings=8192,
            original_max_position_embeddings=2048,
            rope_parameters=dict(
                rope_type="longrope",
                rope_theta=1e4,
                short_factor=[1.0 + at / 8 for at in range(8)],
                long_factor=[4.0] * 8,
                original_max_position_embeddings=2048,
            ),
        ),
    ),
    "deepseek_v2": ("DeepseekV2Config", {**_DEEPSEEK, "topk_method": "greedy", "head_dim": 16}),
    "deepseek_v3": (
        "DeepseekV3Config",
        {**_DEEPSEEK, "q_lora_rank": 24, "n_group": 2, "n_routed_experts": 8, _MTP: 1},
    ),
    "qwen3": ("Qwen3Config", dict(num_hidden_layers=4, head_dim=64)),
    # Four KV heads: on a CPU, SGLang needs one for each rank, counted over all DP attention groups.
    "qwen3_moe": (
        "Qwen3MoeConfig",
        dict(
            **_EXPERTS, num_hidden_layers=4, num_key_value_heads=4, head_dim=32, norm_topk_prob=True
        ),
    ),
    "nemotron_h": (
        "NemotronHConfig",
        dict(layers_block_type=["mamba", "attention", "mlp"] * 2, **_MAMBA),
    ),
    "granitemoehybrid": (
        "GraniteMoeHybridConfig",
        _HYBRID
        | dict(num_local_experts=4, num_experts_per_tok=2, shared_intermediate_size=16)
        | dict(attention_multiplier=0.25, **_MAMBA_2),
    ),
    "falcon_h1": (
        "FalconH1Config",
        dict(num_hidden_layers=2, head_dim=16, mamba_d_ssm=128, key_multiplier=0.5, **_MAMBA_2),
    ),
    "kimi_linear": (
        "KimiLinearConfig",
        {**_HYBRID, **_LATENT}
        | dict(linear_head_dim=16, linear_num_heads=4, mlp_layer_types=["sparse"] * 4)
        | dict(num_local_experts=4, num_experts_per_tok=2, moe_intermediate_size=16)
        | dict(routed_scaling_factor=1.0),
    ),
}


def make(name: str, tokenizer: Path, folder: Path) -> Path:
    """Writes the model ``name`` into ``folder / name``. Copies the tokenizer from the folder ``tokenizer``."""
    import torch
    import transformers

    if name == EAGLE3:
        return _make_eagle3(tokenizer, folder / name)
    if name == EAGLE3_OF_WINDOWS:
        return _make_eagle3(folder / "gpt_oss", folder / name)
    kind, arguments = MODELS[name]
    gemma = name == "gemma3_text"
    config = getattr(transformers, kind)(**{**_COMMON, **arguments}, initializer_range=0.25)
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    # Change weights so that the newest token usually decides the next, and greedy responses run in circles.
    with torch.no_grad():
        if gemma:
            # SGLang ties Gemma's embeddings: a token would predict itself if the norm had no random signs.
            model.model.norm.weight.copy_(-2.0 * (torch.rand(64) < 0.5))
        elif arguments.get("tie_word_embeddings"):
            model.model.norm.weight.copy_(1.0 - 2.0 * (torch.rand(64) < 0.5))
        else:  # not for Gemma, which scales embeddings itself
            model.get_input_embeddings().weight *= 8.0
        latent = "kv_lora_rank" in arguments
        less = _LESS.get(name, _LESS_OF_OTHERS)
        outputs = (*_OUTPUTS, "experts.down_proj") if name in _LESS else _OUTPUTS
        for parameter, weight in model.named_parameters():
            if parameter.endswith(outputs):
                weight *= less
            # In these models a norm would undo the factor, so the norm's weight is set. Gemma's norms add 1.
            if name in ("gemma3_text", "olmo3", "afmoe") and parameter.endswith(_NORMS):
                weight.fill_(_LESS_OF_GEMMA - 1 if gemma else less)
        if name in _CIRCLES:
            circle = _CIRCLES[name]
            token = torch.arange(_COMMON["vocab_size"])
            first = token // circle * circle
            size = (_COMMON["vocab_size"] - first).clamp(max=circle)
            following = first + (token - first + 1) % size
            model.lm_head.weight[following] = 0.07 * model.get_input_embeddings().weight
    path = folder / name
    model.save_pretrained(path)
    for file in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copy(tokenizer / file, path / file)
    described = json.loads((path / "config.json").read_text())
    if arguments.get(_MTP):
        described[_MTP] = arguments[_MTP]
    if name in _DRAFTING:
        _add_drafting_layer(
            path / "model.safetensors", arguments["num_hidden_layers"], _DRAFTING[name]
        )
    if name == "mimo_v2_flash":
        for layer in range(_MIMO_LAYERS):
            # The layer before the last has a window, as a layer that drafts.
            _add_drafting_layer(
                path / "model.safetensors",
                layer,
                _MIMO_DRAFTS,
                f"model.layers.{arguments['num_hidden_layers'] - 2}.",
            )
    # SGLang's Nemotron-H reads older field names, and accepts no infinite ``time_step_limit``.
    if "layers_block_type" in arguments:
        described["layers_block_type"] = arguments["layers_block_type"]
        described |= {f"mamba_{name}": arguments[name] for name in ("n_groups", "chunk_size")}
        del described["mtp_layers_block_type"]
    described.pop("time_step_limit", None)
    if name == "kimi_linear":
        layers = dict(kda_layers=[1, 3], full_attn_layers=[2, 4], short_conv_kernel_size=4)
        described["linear_attn_config"] = dict(layers, head_dim=16, num_heads=4)
    elif latent:
        v3 = {"scoring_func": "sigmoid", "topk_method": "noaux_tc"}
        described |= {"moe_layer_freq": 1, **(v3 if name == "deepseek_v3" else {})}
        described.setdefault("scoring_func", "softmax")
    if name == "exaone_moe":
        described["is_moe_layer"] = [False] * 4
    if "first_k_dense_replace" in arguments:
        described["first_k_dense_replace"] = arguments["first_k_dense_replace"]
    if name == "mimo_v2_flash":
        described |= dict(
            rope_theta=5e6,
            swa_rope_theta=1e4,
            partial_rotary_factor=0.334,
            hybrid_layer_pattern=[int(kind != _FULL) for kind in arguments["layer_types"]],
            sliding_window_size=arguments["sliding_window"],
            swa_num_attention_heads=4,
            swa_num_key_value_heads=2,
            swa_head_dim=32,
            swa_v_head_dim=16,
            add_swa_attention_sink_bias=True,
            moe_layer_freq=[0] * 4,
            layernorm_epsilon=described["rms_norm_eps"],
        )
        # Hugging Face's fields are nested, SGLang's are not.
        described["rope_parameters"] |= dict(rope_type="default", rope_theta=5e6)
    if name == "olmo3":
        del described["rope_parameters"]
        described |= {key: arguments[key] for key in ("rope_theta", "rope_scaling")}
    (path / "config.json").write_text(json.dumps({**described, "dtype": "float32"}))
    return path


def _make_eagle3(target: Path, path: Path) -> Path:
    """Writes an EAGLE3 head with random weights for the model in the folder ``target``. It gets the outputs of
    three layers, and hardly any token that it drafts is accepted."""
    import torch
    from safetensors.torch import save_file

    of = json.loads((target / "config.json").read_text())
    hidden = of["hidden_size"]
    inner = of["intermediate_size"]
    size = of["head_dim"]
    queries, keys = (of[f"num_{kind}_heads"] * size for kind in ("attention", "key_value"))
    layer = {
        "self_attn.q_proj": (queries, 2 * hidden),
        "self_attn.k_proj": (keys, 2 * hidden),
        "self_attn.v_proj": (keys, 2 * hidden),
        "self_attn.o_proj": (hidden, queries),
        "mlp.gate_proj": (inner, hidden),
        "mlp.up_proj": (inner, hidden),
        "mlp.down_proj": (hidden, inner),
    }
    shapes = {f"midlayer.{name}": shape for name, shape in layer.items()}
    shapes |= {"fc": (hidden, 3 * hidden), "lm_head": (of["vocab_size"], hidden)}
    random = torch.Generator().manual_seed(0)
    weights = {
        f"{name}.weight": 0.1 * torch.randn(shape, generator=random)
        for name, shape in shapes.items()
    }
    norms = ("input_layernorm", "hidden_norm", "post_attention_layernorm")
    for name in (*(f"midlayer.{norm}" for norm in norms), "norm"):
        weights[f"{name}.weight"] = torch.ones(hidden)
    path.mkdir()
    save_file(weights, path / "model.safetensors", metadata={"format": "pt"})
    kept = (
        *(
            "vocab_size",
            "hidden_size",
            "intermediate_size",
            "head_dim",
            "hidden_act",
            "rms_norm_eps",
        ),
        *("num_attention_heads", "num_key_value_heads", "max_position_embeddings"),
        *("rope_parameters", "bos_token_id", "eos_token_id", "pad_token_id"),
    )
    described = {name: of[name] for name in kept} | {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "num_hidden_layers": 1,
        "draft_vocab_size": of["vocab_size"],
        "tie_word_embeddings": False,
        "eagle_config": {"eagle_aux_hidden_state_layer_ids": [0, 1, 2]},
        "dtype": "float32",
    }
    (path / "config.json").write_text(json.dumps(described))
    return path


def _add_drafting_layer(
    file: Path, layers: int, names: tuple[str, ...], copied: str | None = None
) -> None:
    """Adds a layer of multi-token prediction to a model of ``layers`` layers: a copy of the last one, or of
    the one that ``copied`` names, that gets the newest token's embedding and little of the last output, so it
    drafts what the model says. ``names``: see ``_DRAFTING``."""
    import torch
    from safetensors.torch import load_file, save_file

    weights = load_file(file)
    last = f"model.layers.{layers - 1}." if copied is None else copied
    drafting, *norms, join, norm = (name.format(layers) for name in names)
    for name in [name for name in weights if name.startswith(last)]:
        weights[name.replace(last, drafting)] = weights[name].clone()
    hidden = weights["model.norm.weight"].numel()
    one = torch.eye(hidden)
    weights[f"{join}.weight"] = torch.cat([one, 0.1 * one], dim=1)
    for of in norms:
        weights[f"{of}.weight"] = torch.ones(hidden)
    weights[f"{norm}.weight"] = weights["model.norm.weight"].clone()
    if names is _DEEPSEEK_DRAFTS:
        weights[drafting + "shared_head.head.weight"] = weights["lm_head.weight"].clone()
        weights[drafting + "embed_tokens.weight"] = weights["model.embed_tokens.weight"].clone()
    save_file(weights, file, metadata={"format": "pt"})
