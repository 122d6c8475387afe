"""Small configurations of every family of models: what makes each special is on, in sizes that no two of are alike."""

from __future__ import annotations

from typing import Any

_LATENT = {
    "kv_lora_rank": 48,
    "qk_nope_head_dim": 24,
    "qk_rope_head_dim": 16,
    "v_head_dim": 20,
    "num_key_value_heads": 4,
    "head_dim": 16,
}
_MOE = {"num_experts_per_tok": 3, "moe_intermediate_size": 48}

FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaConfig", {"attention_bias": True, "mlp_bias": True}),
    "mistral": ("MistralConfig", {"sliding_window": 24, "head_dim": 32}),
    "qwen2": (
        "Qwen2Config",
        {"use_sliding_window": True, "sliding_window": 24, "max_window_layers": 1},
    ),
    "qwen3": ("Qwen3Config", {"head_dim": 32}),
    "phi3": (
        "Phi3Config",
        {
            "max_position_embeddings": 1024,
            "original_max_position_embeddings": 512,
            "rope_parameters": {
                "rope_type": "longrope",
                "rope_theta": 10000.0,
                "short_factor": [1.0, 1.1, 1.2, 1.5],
                "long_factor": [1.0, 1.5, 3.0, 8.0],
                "partial_rotary_factor": 0.5,
            },
        },
    ),
    "mixtral": ("MixtralConfig", {"num_local_experts": 6, "num_experts_per_tok": 2}),
    "qwen2_moe": (
        "Qwen2MoeConfig",
        {"num_experts": 8, "shared_expert_intermediate_size": 96, **_MOE},
    ),
    "qwen3_moe": ("Qwen3MoeConfig", {"num_experts": 8, "head_dim": 32, "norm_topk_prob": True, **_MOE}),
    "olmoe": ("OlmoeConfig", {"num_experts": 8, "num_experts_per_tok": 3}),
    "granite": (
        "GraniteConfig",
        {
            "embedding_multiplier": 3.0,
            "attention_multiplier": 0.3,
            "residual_multiplier": 0.7,
            "logits_scaling": 2.0,
        },
    ),
    "granite_moe": (
        "GraniteMoeConfig",
        {
            "num_local_experts": 6,
            "num_experts_per_tok": 2,
            "embedding_multiplier": 3.0,
            "attention_multiplier": 0.3,
            "residual_multiplier": 0.7,
            "logits_scaling": 2.0,
        },
    ),
    "gemma": ("GemmaConfig", {"head_dim": 32}),
    "gemma2": (
        "Gemma2Config",
        {"head_dim": 32, "sliding_window": 24, "query_pre_attn_scalar": 24, "attn_logit_softcapping": 5.0},
    ),
    "gemma3": (
        "Gemma3TextConfig",
        {
            "head_dim": 32,
            "sliding_window": 24,
            "query_pre_attn_scalar": 24,
            "layer_types": ["sliding_attention", "full_attention"],
            "rope_parameters": {
                "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
                "full_attention": {"rope_type": "linear", "rope_theta": 1000000.0, "factor": 4.0},
            },
        },
    ),
    "olmo2": ("Olmo2Config", {}),
    "olmo3": (
        "Olmo3Config",
        {
            "sliding_window": 24,
            "layer_types": ["sliding_attention", "full_attention"],
            "rope_parameters": {
                "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
                "full_attention": {
                    "rope_type": "yarn",
                    "rope_theta": 10000.0,
                    "factor": 4.0,
                    "original_max_position_embeddings": 64,
                },
            },
        },
    ),
    "glm": ("GlmConfig", {"head_dim": 32}),
    "glm4": ("Glm4Config", {"head_dim": 32}),
    "glm4_moe": (
        "Glm4MoeConfig",
        {
            "n_routed_experts": 8,
            "n_group": 2,
            "topk_group": 1,
            "n_shared_experts": 2,
            "routed_scaling_factor": 1.5,
            "use_qk_norm": True,
            "attention_bias": True,
            **_MOE,
        },
    ),
    "cohere": ("CohereConfig", {"logit_scale": 0.5}),
    "cohere2": (
        "Cohere2Config",
        {
            "logit_scale": 0.5,
            "sliding_window": 24,
            "layer_types": ["sliding_attention", "full_attention"],
        },
    ),
    "starcoder2": ("Starcoder2Config", {"sliding_window": 24}),
    "gpt2": ("GPT2Config", {"n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 1024}),
    "gpt_neox": ("GPTNeoXConfig", {}),
    "gpt_neox_sequential": ("GPTNeoXConfig", {"use_parallel_residual": False}),
    "falcon_7b": ("FalconConfig", {"ffn_hidden_size": 160}),
    "falcon_40b": (
        "FalconConfig",
        {"new_decoder_architecture": True, "num_kv_heads": 2, "ffn_hidden_size": 160, "bias": True},
    ),
    "falcon_rw": (
        "FalconConfig",
        {"multi_query": False, "parallel_attn": False, "bias": True, "ffn_hidden_size": 160},
    ),
    "gpt_oss": (
        "GptOssConfig",
        {
            "num_local_experts": 6,
            "num_experts_per_tok": 2,
            "head_dim": 32,
            "sliding_window": 24,
            "swiglu_limit": 1.5,
            "layer_types": ["sliding_attention", "full_attention"],
        },
    ),
    "deepseek_v2": (
        "DeepseekV2Config",
        {
            "q_lora_rank": None,
            "topk_method": "group_limited_greedy",
            "n_routed_experts": 8,
            "n_group": 4,
            "topk_group": 2,
            "n_shared_experts": 2,
            "first_k_dense_replace": 1,
            "routed_scaling_factor": 2.0,
            **_LATENT,
            **_MOE,
        },
    ),
    "deepseek_v3": (
        "DeepseekV3Config",
        {
            "q_lora_rank": 40,
            "n_routed_experts": 8,
            "n_group": 2,
            "topk_group": 1,
            "first_k_dense_replace": 1,
            "max_position_embeddings": 1024,
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 10000.0,
                "factor": 4.0,
                "mscale": 1.0,
                "mscale_all_dim": 0.5,
                "original_max_position_embeddings": 256,
            },
            **_LATENT,
            **_MOE,
        },
    ),
    "llama4": (
        "Llama4TextConfig",
        {
            "head_dim": 16,
            "intermediate_size_mlp": 112,
            "num_local_experts": 4,
            "interleave_moe_layer_step": 2,
            "attention_chunk_size": 24,
            "no_rope_layers": [1, 0],
            "layer_types": ["chunked_attention", "full_attention"],
            "floor_scale": 16,
            "attn_scale": 0.5,
        },
    ),
    "mamba2": (
        "Mamba2Config",
        {
            "num_heads": 8,
            "head_dim": 16,
            "n_groups": 2,
            "state_size": 16,
            "expand": 2,
            "time_step_limit": (0.0, 4.0),
        },
    ),
    "granite_hybrid": (
        "GraniteMoeHybridConfig",
        {
            "num_local_experts": 6,
            "num_experts_per_tok": 2,
            "shared_intermediate_size": 112,
            "layer_types": ["linear_attention", "full_attention"],
            "embedding_multiplier": 3.0,
            "attention_multiplier": 0.3,
            "residual_multiplier": 0.7,
            "logits_scaling": 2.0,
            "mamba_n_heads": 8,
            "mamba_d_head": 16,
            "mamba_n_groups": 2,
            "mamba_d_state": 12,
            "mamba_proj_bias": True,
        },
    ),
    "qwen3_next": (
        "Qwen3NextConfig",
        {
            "num_experts": 8,
            "head_dim": 32,
            "shared_expert_intermediate_size": 96,
            "layer_types": ["linear_attention", "full_attention"],
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 6,
            "linear_key_head_dim": 12,
            "linear_value_head_dim": 20,
            **_MOE,
        },
    ),
    "bamba": (
        "BambaConfig",
        {
            "attn_layer_indices": [1],
            "mamba_n_heads": 8,
            "mamba_d_head": 16,
            "mamba_n_groups": 2,
            "mamba_d_state": 12,
            "attention_bias": True,
        },
    ),
    "falcon_h1": (
        "FalconH1Config",
        {
            "mamba_d_ssm": 96,
            "mamba_n_heads": 6,
            "mamba_d_head": 16,
            "mamba_n_groups": 2,
            "mamba_d_state": 12,
            "embedding_multiplier": 2.0,
            "lm_head_multiplier": 0.5,
            "mlp_multipliers": [0.8, 0.6],
            "key_multiplier": 0.7,
            "attention_in_multiplier": 0.9,
            "attention_out_multiplier": 1.1,
            "ssm_in_multiplier": 1.2,
            "ssm_out_multiplier": 0.8,
            "ssm_multipliers": [0.9, 1.1, 0.7, 1.2, 0.8],
        },
    ),
    "falcon_h1_norm": (
        "FalconH1Config",
        {
            "mamba_d_ssm": 96,
            "mamba_n_heads": 6,
            "mamba_d_head": 16,
            "mamba_n_groups": 2,
            "mamba_d_state": 12,
            "mamba_rms_norm": True,
            "mamba_norm_before_gate": False,
        },
    ),
    "lfm2": (
        "Lfm2Config",
        {
            "layer_types": ["conv", "full_attention"],
            "conv_bias": True,
            "block_multiple_of": 48,
            "tie_word_embeddings": True,
        },
    ),
    "mamba": ("MambaConfig", {"state_size": 12, "use_bias": True, "tie_word_embeddings": True}),
    "jamba": (
        "JambaConfig",
        {
            "num_experts": 4,
            "attn_layer_period": 2,
            "attn_layer_offset": 1,
            "expert_layer_offset": 0,
            "mamba_d_state": 12,
            "mamba_dt_rank": 6,
        },
    ),
    "nemotron_h": (
        "NemotronHConfig",
        {
            "layers_block_type": ["linear_attention", "mlp", "full_attention"],
            "head_dim": 32,
            "mamba_num_heads": 8,
            "mamba_head_dim": 12,
            "n_groups": 2,
            "ssm_state_size": 12,
            "mlp_bias": True,
        },
    ),
}

OTHER_FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "opt": ("OPTConfig", {"ffn_dim": 160, "word_embed_proj_dim": 64}),
    "phi": ("PhiConfig", {"partial_rotary_factor": 0.5}),
    "gptj": ("GPTJConfig", {"n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 1024, "rotary_dim": 8}),
    "gpt_bigcode": ("GPTBigCodeConfig", {"n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 1024}),
    "smollm3": ("SmolLM3Config", {"no_rope_layers": [1, 0]}),
    "exaone4": (
        "Exaone4Config",
        {"sliding_window": 24, "layer_types": ["sliding_attention", "full_attention"]},
    ),
    "vaultgemma": (
        "VaultGemmaConfig",
        {"head_dim": 32, "sliding_window": 24, "query_pre_attn_scalar": 24, "attn_logit_softcapping": 5.0},
    ),
    "gemma3n": (
        "Gemma3nTextConfig",
        {
            "head_dim": 32,
            "num_hidden_layers": 4,
            "num_kv_shared_layers": 2,
            "layer_types": ["sliding_attention", "full_attention"] * 2,
            "sliding_window": 24,
            "intermediate_size": [160] * 4,
            "activation_sparsity_pattern": [0.5, 0.0, 0.0, 0.0],
            "vocab_size_per_layer_input": 1024,
            "hidden_size_per_layer_input": 16,
            "laurel_rank": 8,
        },
    ),
    "granite_swa": (
        "GraniteSWAConfig",
        {
            "sliding_window": 24,
            "layer_types": ["sliding_attention", "full_attention"],
            "attention_multiplier": 0.3,
        },
    ),
    "minicpm3": (
        "MiniCPM3Config",
        {
            "q_lora_rank": 32,
            "kv_lora_rank": 48,
            "qk_nope_head_dim": 24,
            "qk_rope_head_dim": 16,
            "v_head_dim": 20,
            "num_key_value_heads": 4,
        },
    ),
    "ernie_moe": (
        "Ernie4_5_MoeConfig",
        {"moe_num_experts": 6, "moe_k": 2, "moe_intermediate_size": 48, "moe_layer_start_index": 0},
    ),
}
"""Decoders without a file here."""
