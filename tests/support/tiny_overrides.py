"""What the common sizes of tiny random checkpoints do not fit, by model type or the type of a part."""

from __future__ import annotations

from typing import Any

NUM_LAYERS = 4
WINDOW = 8

# A field that a type is not given.
LEFT_OUT: Any = object()

_MIXED = ["sliding_attention", "full_attention"] * 2
_SPARSE = ["dense", "sparse"] * 2
# Language models that are encoders unless their config says otherwise.
_ENCODERS = (
    "bert", "bert-generation", "big_bird", "camembert", "data2vec-text", "electra", "ernie", "megatron-bert",
    "rembert", "roberta", "roberta-prelayernorm", "roc_bert", "roformer", "xlm-roberta", "xlm-roberta-xl",
)  # fmt: skip


def _sections(*sections: int, **others: Any) -> dict[str, Any]:
    """Of the rotations of a head, for positions within an image."""
    return {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": list(sections), **others}}


OVERRIDES: dict[str, dict[str, Any]] = {
    "bailing_hybrid": {"layer_types": ["linear_attention", "full_attention"] * 2},
    "bamba": {"attn_layer_indices": [1, 3], "mamba_n_heads": 8, "mamba_d_state": 16},
    "blt": {
        "vocab_size": 260,
        "encoder_hash_byte_group_vocab": 64,
        "patching_threshold": 5.08,
        "patcher_config": {"vocab_size": 260},
        "encoder_config": {"vocab_size": 260, "hidden_size_global": 32},
        "decoder_config": {"vocab_size": 260, "hidden_size_global": 32},
    },
    "dbrx": {
        "attn_config": {"kv_n_heads": 2, "rope_theta": 1e4, "clip_qkv": 2.0},
        "ffn_config": {"ffn_hidden_size": 48, "moe_num_experts": 4, "moe_top_k": 2},
    },
    "encoder-decoder": {"encoder": {"is_decoder": False}, "decoder": {"is_decoder": True, "add_cross_attention": True}},
    "gemma3n_text": {"layer_types": _MIXED, "num_kv_shared_layers": 2, "activation_sparsity_pattern": [0.0] * 4},
    "gpt_neo": {"attention_types": [[["global", "local"], 2]], "window_size": WINDOW},
    "granitemoehybrid": {"layer_types": ["mamba", "attention"] * 2, "mamba_n_heads": 8, "mamba_d_state": 16},
    "kimi_linear": {"layer_types": ["linear_attention", "full_attention"] * 2},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"] * 2},
    "longt5": {"decoder_start_token_id": 0},
    "mt5": {"decoder_start_token_id": 0},
    "umt5": {"decoder_start_token_id": 0},
    "switch_transformers": {"decoder_start_token_id": 0},
    "longcat_flash": {"head_dim": 8, "num_hidden_layers": LEFT_OUT, "num_layers": 2, "zero_expert_num": 2},
    "prophetnet": {"pad_token_id": 0, "bos_token_id": 2, "decoder_start_token_id": 2},
    "lfm2": {"layer_types": ["conv", "full_attention"] * 2},
    "llama4_text": {"floor_scale": 4},
    "mamba2": {"num_heads": 8, "state_size": 16, "n_groups": 1, "head_dim": 16},
    "moshi": {"sliding_window": 512, "audio_vocab_size": 64},
    "plbart": {"decoder_start_token_id": 1},
    "phimoe": {"sliding_window": None},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1},
    "t5": {"decoder_start_token_id": 0},
    "udop": {"decoder_start_token_id": 0},
    **{one: {"is_decoder": True} for one in _ENCODERS},
    # Whose parts see pictures.
    "chameleon": {
        "vocabulary_map": {"<image>": 9, "IMGIMGAZ": 10, "IMGIMGBZ": 11},
        "vq_config": {"base_channels": 32, "embed_dim": 16, "num_embeddings": 2, "latent_channels": 16},
    },
    "emu3": {
        "vocabulary_map": {"<image>": 9, "<|extra_200|>": 10, "<|visual token 000000|>": 11},
        "vq_config": {"base_channels": 32, "embed_dim": 16, "codebook_size": 2, "latent_channels": 16},
    },
    "cohere_compass_text": {
        "layer_types": _MIXED,
        "rope_parameters": {"sliding_attention": {"rope_type": "default", "rope_theta": 1e4}, "full_attention": None},
    },
    "cosmos3_edge_text": _sections(2, 3, 3),
    **{name: {"index_topk": WINDOW, "index_head_dim": 16} for name in ("deepseek_v32", "glm_moe_dsa")},
    "deepseek_ocr2_text": {"mlp_layer_types": _SPARSE},
    "ernie4_5_vl_moe_text": {"moe_intermediate_size": [48, 32], **_sections(3, 3, 2)},
    "glm4v_text": _sections(2, 3, 3, partial_rotary_factor=1.0),
    "glm4v_moe_text": _sections(1, 2, 1, partial_rotary_factor=0.5),
    "glm_ocr_text": _sections(2, 3, 3, partial_rotary_factor=1.0),
    "granite4_vision": {
        "deepstack_layer_map": [[-1, 0]],
        "downsample_rate": "1/2",
        "spatial_target_layers": [1],
        "qformer_config": {"num_attention_heads": 2, "hidden_size": 128},
        "vision_config": {"hidden_size": 128},
    },
    "janus_vqgan": {"base_channels": 32, "embed_dim": 8, "latent_channels": 16, "num_embeddings": 16},
    "hunyuan_vl_text": _sections(2, 2, 2, 2),
    "hy_v4_vl_text": _sections(1, 2, 1),
    "molmo2_vision": {"image_size": [28, 28]},
    "molmo2_adapter": {"vision_feature_layer": [-1, -2]},
    "muse_spark_audio": {"num_hidden_layers": 4, "hidden_sizes": [8, 16, 24, 32]},
    "nemo_speechlm": {
        "audio_config": {"diarization_config": {"head_config": {"audio_hidden_size": 32}}},
        "text_config": {"hybrid_override_pattern": "M*EM", "mamba_num_heads": 8, "ssm_state_size": 16},
        "word_timestamp_config": {"blank_token_id": 63},
    },
    "falcon_h1": {"mamba_n_heads": 8, "mamba_d_ssm": 64, "mamba_d_state": 16},
    "nemotron_h": {
        "mamba_num_heads": 8,
        "mamba_head_dim": 16,
        "n_groups": 2,
        "ssm_state_size": 16,
        "moe_shared_expert_intermediate_size": 48,
        "time_step_min": 1e-30,
    },
    "nemotron_h_omni": {
        "vision_config": {"video_temporal_patch_size": 2},
        "audio_config": {"projection_hidden_size": 32, "projection_bias": False},
    },
    "paddleocr_vl_text": _sections(2, 3, 3),
    "qwen2_5_omni_text": _sections(2, 3, 3),
    "qwen3_omni_moe_text": _sections(2, 3, 3),
    "qwen2_vl_text": _sections(2, 3, 3),
    "qwen2_5_vl_text": _sections(2, 3, 3),
    "qwen3_5_text": _sections(2, 1, 1, partial_rotary_factor=0.5),
    "qwen3_5_moe_text": _sections(2, 1, 1, partial_rotary_factor=0.5),
    "qwen3_vl_text": _sections(2, 3, 3),
    "qwen3_vl_moe_text": _sections(2, 3, 3),
    "qwen4_exp_text": {
        "indexer_n_heads": 2,
        "indexer_kv_heads": 1,
        "indexer_head_dim": 16,
        "indexer_budget": 8,
        "indexer_compress_ratio": 2,
    },
    "step3p5_vision": {"image_size": 28},
    "unlimited_ocr_text": {"num_key_value_heads": 4},
    "wavtokenizer_encoder": {"codebook_dim": 32, "codebook_size": 16},
    "apertus1p5": {
        "image_token_id": 20,
        "audio_token_id": 21,
        "image_token_offset": 100,
        "audio_token_offset": 116,
        "vision_config": {"codebook_size": 16, "base_channels": 32, "embed_dim": 16},
    },
    "dots3_note_audio_encoder": {"adapter_input_size": 32, "adapter_out_dim": 64},
    "dots3_note_vision_encoder": {
        "num_hidden_layers": 42,
        "adapter_in_dim": 32,
        "adapter_input_size": 32,
        "adapter_out_dim": 64,
    },
    "florence2": {"tie_word_embeddings": True, "text_config": {"tie_word_embeddings": True}},
    "florence_vision": {
        "depths": [1],
        "patch_size": [7],
        "patch_stride": [4],
        "patch_padding": [3],
        "patch_prenorm": [False],
        "embed_dim": [32],
        "num_heads": [2],
        "num_groups": [2],
    },
    "evolla": {
        "protein_encoder_config": {
            "hidden_size": 32,
            "intermediate_size": 64,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "vocab_size": 64,
        },
        "aligner_num_add_layers": 2,
        "resampler_depth": 1,
        "resampler_num_latents": 4,
    },
    "fun_asr_nano": {"adaptor_config": {"hidden_size": 64, "intermediate_size": 16, "num_attention_heads": 2}},
    "vibevoice_asr": {
        part: {"num_filters": 1, "depths": [1] * 7}
        for part in ("semantic_tokenizer_encoder_config", "acoustic_tokenizer_encoder_config")
    },
    "kyutai_speech_to_text": {"audio_pad_token_id": 255, "num_codebooks": 2, "codebook_vocab_size": 16},
    "mimi": {"upsample_groups": 32},
    "gemma4_assistant": {"text_config": {"hidden_size_per_layer_input": 0, "vocab_size_per_layer_input": 0}},
    "glm5_next_text": {
        "qk_rope_head_dim": 0,
        "q_lora_rank": 32,
        "index_topk": 8,
        "index_kpool": 2,
        "index_head_dim": 16,
        "index_n_heads": 2,
        "linear_head_dim": 16,
        "linear_num_heads": 4,
        "hc_mult": 2,
    },
    "reformer": {"is_decoder": True, "axial_pos_embds": False, "attn_layers": ["local"] * 4, "feed_forward_size": 96},
    "xlm": {"causal": True},
    "xlnet": {"attn_type": "uni"},
    "xmod": {"is_decoder": True, "languages": ["en_XX"], "default_language": "en_XX"},
    "zamba": {"attention_hidden_size": LEFT_OUT, "head_dim": LEFT_OUT, "num_key_value_heads": 4},
    "zamba2": {
        "layer_types": LEFT_OUT,
        "layers_block_type": ["mamba", "hybrid"] * 2,
        "head_dim": LEFT_OUT,
        "kv_channels": LEFT_OUT,
        "num_key_value_heads": 4,
        "adapter_rank": 8,
    },
    "zaya": {"num_experts_per_tok": 1},
}
