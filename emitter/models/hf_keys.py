"""Keys of a config.json that HF's classes define or read, by model type: written by `castiron.reference.config_keys`.

A key that is in neither table is one that HF's model never sees. Of transformers 5.23.0.
"""

# Read of every family's config, where it has them.
SHARED = frozenset(
    """
    allow_is_causal_skip attention_chunk_size head_dim hidden_size is_causal kv_sharing_modes layer_types
    max_position_embeddings num_attention_heads num_hidden_layers number_of_conv_states partial_rotary_factor
    per_layer_config quantization_config rope_parameters rope_scaling rope_theta sliding_window
    """.split()
)

# Of each model type, what its config class defines and its model reads besides.
DEFINED = {
    "arcee": frozenset(
        """
        attention_bias attention_dropout bos_token_id eos_token_id hidden_act initializer_range intermediate_size
        mlp_bias num_key_value_heads pad_token_id rms_norm_eps tie_word_embeddings use_cache vocab_size
        """.split()
    ),
    "bert": frozenset(
        """
        add_cross_attention attention_probs_dropout_prob bos_token_id classifier_dropout embedding_size eos_token_id
        hidden_act hidden_dropout_prob initializer_range intermediate_size is_decoder layer_norm_eps num_labels
        pad_token_id tie_word_embeddings type_vocab_size use_cache vocab_size
        """.split()
    ),
    "cohere2": frozenset(
        """
        attention_bias attention_dropout bos_token_id eos_token_id hidden_act initializer_range intermediate_size
        layer_norm_eps logit_scale num_key_value_heads pad_token_id sliding_window_pattern tie_word_embeddings use_cache
        vocab_size
        """.split()
    ),
    "ernie4_5": frozenset(
        """
        bos_token_id eos_token_id hidden_act initializer_range intermediate_size num_key_value_heads pad_token_id
        rms_norm_eps tie_word_embeddings use_bias use_cache vocab_size
        """.split()
    ),
    "exaone4": frozenset(
        """
        attention_dropout bos_token_id eos_token_id hidden_act initializer_range intermediate_size num_key_value_heads
        pad_token_id rms_norm_eps sliding_window_pattern tie_word_embeddings use_cache vocab_size
        """.split()
    ),
    "falcon_h1": frozenset(
        """
        attention_bias attention_dropout attention_in_multiplier attention_out_multiplier bos_token_id
        embedding_multiplier eos_token_id hidden_act initializer_range intermediate_size key_multiplier
        lm_head_multiplier mamba_chunk_size mamba_conv_bias mamba_d_conv mamba_d_head mamba_d_ssm mamba_d_state
        mamba_expand mamba_n_groups mamba_n_heads mamba_norm_before_gate mamba_proj_bias mamba_rms_norm mlp_bias
        mlp_multipliers num_key_value_heads num_logits_to_keep pad_token_id projectors_bias rms_norm_eps
        ssm_in_multiplier ssm_multipliers ssm_out_multiplier tie_word_embeddings time_step_limit use_cache vocab_size
        """.split()
    ),
    "gemma": frozenset(
        """
        attention_bias attention_dropout bos_token_id eos_token_id hidden_act initializer_range intermediate_size
        num_key_value_heads pad_token_id rms_norm_eps tie_word_embeddings use_bidirectional_attention use_cache
        vocab_size
        """.split()
    ),
    "gemma2": frozenset(
        """
        attention_bias attention_dropout attn_logit_softcapping bos_token_id eos_token_id final_logit_softcapping
        hidden_activation initializer_range intermediate_size num_key_value_heads pad_token_id query_pre_attn_scalar
        rms_norm_eps tie_word_embeddings use_bidirectional_attention use_cache vocab_size
        """.split()
    ),
    "gemma3_text": frozenset(
        """
        attention_bias attention_dropout attn_logit_softcapping bos_token_id eos_token_id final_logit_softcapping
        hidden_activation image_size image_token_id initializer_range intermediate_size layer_norm_eps
        mm_tokens_per_image num_key_value_heads pad_token_id patch_size query_pre_attn_scalar rms_norm_eps
        rope_local_base_freq sliding_window_pattern text_config tie_word_embeddings token_type_ids
        use_bidirectional_attention use_cache vision_config vocab_size
        """.split()
    ),
    "gemma4_text": frozenset(
        """
        attention_bias attention_context_left attention_context_right attention_dropout attention_invalid_logits_value
        attention_k_eq_v attention_logit_cap audio_config audio_token_id bos_token_id conv_kernel_size enable_moe_block
        eos_token_id final_logit_softcapping global_head_dim gradient_clipping hidden_act hidden_activation
        hidden_size_per_layer_input image_token_id initializer_range intermediate_size mm_token_type_ids
        moe_intermediate_size num_experts num_global_key_value_heads num_key_value_heads num_kv_shared_layers
        output_proj_dims pad_token_id patch_size pooling_kernel_size position_embedding_size residual_weight
        return_shared_kv_states rms_norm_eps shared_kv_states standardize subsampling_conv_channels text_config
        tie_word_embeddings top_k_experts use_bidirectional_attention use_cache use_clipped_linears use_double_wide_mlp
        video_token_id vision_config vocab_size vocab_size_per_layer_input
        """.split()
    ),
    "glm4_moe_lite": frozenset(
        """
        attention_bias attention_dropout bos_token_id eos_token_id hidden_act initializer_range intermediate_size
        kv_lora_rank mlp_layer_types moe_intermediate_size n_group n_routed_experts n_shared_experts norm_topk_prob
        num_experts_per_tok num_key_value_heads num_local_experts output_router_logits pad_token_id pretraining_tp
        q_lora_rank qk_nope_head_dim qk_rope_head_dim rms_norm_eps rope_interleave routed_scaling_factor
        tie_word_embeddings topk_group use_cache v_head_dim vocab_size
        """.split()
    ),
    "gpt2": frozenset(
        """
        activation_function add_cross_attention attn_pdrop bos_token_id classifier_dropout embd_pdrop eos_token_id
        hidden_dropout initializer_range layer_norm_epsilon n_embd n_head n_inner n_layer n_positions num_labels
        output_attentions pad_token_id reorder_and_upcast_attn resid_pdrop scale_attn_by_inverse_layer_idx
        scale_attn_weights summary_activation summary_first_dropout summary_last_dropout summary_proj_to_labels
        summary_type summary_use_proj tie_word_embeddings use_cache vocab_size
        """.split()
    ),
    "gpt_oss": frozenset(
        """
        attention_bias attention_dropout bos_token_id eos_token_id hidden_act initializer_range intermediate_size
        num_experts num_experts_per_tok num_key_value_heads num_local_experts output_router_logits pad_token_id
        rms_norm_eps router_aux_loss_coef swiglu_alpha swiglu_limit tie_word_embeddings use_cache vocab_size
        """.split()
    ),
    "granite": frozenset(
        """
        attention_bias attention_dropout attention_multiplier bos_token_id embedding_multiplier eos_token_id hidden_act
        initializer_range intermediate_size logits_scaling mlp_bias num_key_value_heads pad_token_id residual_multiplier
        rms_norm_eps tie_word_embeddings use_cache vocab_size
        """.split()
    ),
    "granitemoe": frozenset(
        """
        attention_bias attention_dropout attention_multiplier bos_token_id embedding_multiplier eos_token_id hidden_act
        initializer_range intermediate_size logits_scaling num_experts_per_tok num_key_value_heads num_local_experts
        output_router_logits pad_token_id residual_multiplier rms_norm_eps router_aux_loss_coef tie_word_embeddings
        use_cache vocab_size
        """.split()
    ),
    "granitemoehybrid": frozenset(
        """
        attention_bias attention_dropout attention_multiplier bos_token_id embedding_multiplier eos_token_id hidden_act
        initializer_range intermediate_size layers_block_type logits_scaling mamba_chunk_size mamba_conv_bias
        mamba_d_conv mamba_d_head mamba_d_state mamba_expand mamba_n_groups mamba_n_heads mamba_proj_bias
        num_experts_per_tok num_key_value_heads num_local_experts output_router_logits pad_token_id
        position_embedding_type residual_multiplier rms_norm_eps router_aux_loss_coef shared_intermediate_size
        tie_word_embeddings time_step_limit use_cache vocab_size
        """.split()
    ),
    "hunyuan_v1_dense": frozenset(
        """
        attention_bias attention_dropout bos_token_id eod_token_id eos_token_id hidden_act initializer_range
        intermediate_size num_key_value_heads pad_token_id pretraining_tp rms_norm_eps tie_word_embeddings use_cache
        vocab_size
        """.split()
    ),
    "lfm2": frozenset(
        """
        block_auto_adjust_ff_dim block_ff_dim block_ffn_dim_multiplier block_multiple_of bos_token_id conv_L_cache
        conv_bias eos_token_id full_attn_idxs initializer_range intermediate_size norm_eps num_key_value_heads
        pad_token_id tie_embedding tie_word_embeddings use_cache vocab_size
        """.split()
    ),
    "lfm2_moe": frozenset(
        """
        bos_token_id conv_L_cache conv_bias eos_token_id initializer_range intermediate_size moe_intermediate_size
        norm_eps norm_topk_prob num_dense_layers num_experts num_experts_per_tok num_key_value_heads
        output_router_logits pad_token_id routed_scaling_factor tie_embedding tie_word_embeddings use_cache
        use_expert_bias vocab_size
        """.split()
    ),
    "lfm3": frozenset(
        """
        attention_bias attention_dropout bos_token_id conv_L_cache conv_bias eos_token_id initializer_range
        intermediate_size norm_eps num_key_value_heads pad_token_id rms_norm_eps tie_word_embeddings use_attention_gate
        use_cache use_sandwich_norm vocab_size
        """.split()
    ),
    "llama": frozenset(
        """
        attention_bias attention_dropout bos_token_id eos_token_id hidden_act initializer_range intermediate_size
        mlp_bias num_key_value_heads pad_token_id pretraining_tp rms_norm_eps tie_word_embeddings use_cache vocab_size
        """.split()
    ),
    "ministral3": frozenset(
        """
        attention_dropout bos_token_id eos_token_id hidden_act initializer_range intermediate_size num_key_value_heads
        pad_token_id rms_norm_eps tie_word_embeddings use_cache vocab_size
        """.split()
    ),
    "mistral": frozenset(
        """
        attention_dropout bos_token_id eos_token_id hidden_act initializer_range intermediate_size num_key_value_heads
        pad_token_id rms_norm_eps tie_word_embeddings use_cache vocab_size
        """.split()
    ),
    "mixtral": frozenset(
        """
        attention_dropout bos_token_id eos_token_id hidden_act initializer_range intermediate_size num_experts
        num_experts_per_tok num_key_value_heads num_local_experts output_router_logits pad_token_id rms_norm_eps
        router_aux_loss_coef router_jitter_noise tie_word_embeddings use_cache vocab_size
        """.split()
    ),
    "modernbert": frozenset(
        """
        attention_bias attention_dropout bos_token_id classifier_activation classifier_bias classifier_dropout
        classifier_pooling cls_token_id decoder_bias deterministic_flash_attn embedding_dropout eos_token_id
        global_attn_every_n_layers global_rope_theta hidden_activation initializer_cutoff_factor initializer_range
        intermediate_size local_attention local_rope_theta mlp_bias mlp_dropout norm_bias norm_eps num_labels
        pad_token_id sep_token_id sparse_pred_ignore_index sparse_prediction tie_word_embeddings vocab_size
        """.split()
    ),
    "nemotron_h": frozenset(
        """
        attention_bias attention_dropout bos_token_id chunk_size conv_kernel eos_token_id expand hidden_dropout
        hybrid_override_pattern initializer_range intermediate_size layer_norm_epsilon layers_block_type
        mamba_chunk_size mamba_conv_bias mamba_d_conv mamba_dt_init_floor mamba_dt_limit mamba_dt_max mamba_dt_min
        mamba_expand mamba_head_dim mamba_hidden_act mamba_n_groups mamba_num_heads mamba_proj_bias
        mamba_ssm_cache_dtype mlp_bias mlp_hidden_act moe_intermediate_size moe_latent_size
        moe_shared_expert_intermediate_size moe_shared_expert_overlap mtp_hybrid_override_pattern mtp_layers_block_type
        n_group n_groups n_routed_experts n_shared_experts norm_topk_prob num_experts_per_tok num_key_value_heads
        num_local_experts num_logits_to_keep num_nextn_predict_layers output_router_logits pad_token_id
        rescale_prenorm_residual residual_in_fp32 routed_scaling_factor ssm_state_size tie_word_embeddings
        time_step_floor time_step_limit time_step_max time_step_min topk_group use_bias use_cache use_conv_bias
        use_mamba_kernels vocab_size
        """.split()
    ),
    "olmo2": frozenset(
        """
        attention_bias attention_dropout bos_token_id eos_token_id hidden_act initializer_range intermediate_size
        num_key_value_heads pad_token_id rms_norm_eps tie_word_embeddings use_cache vocab_size
        """.split()
    ),
    "olmo3": frozenset(
        """
        attention_bias attention_dropout bos_token_id eos_token_id hidden_act initializer_range intermediate_size
        num_key_value_heads pad_token_id rms_norm_eps tie_word_embeddings use_cache vocab_size
        """.split()
    ),
    "phi3": frozenset(
        """
        attention_dropout bos_token_id embd_pdrop eos_token_id hidden_act initializer_range intermediate_size
        num_key_value_heads original_max_position_embeddings pad_token_id resid_pdrop rms_norm_eps tie_word_embeddings
        use_cache vocab_size
        """.split()
    ),
    "qwen2": frozenset(
        """
        attention_dropout bos_token_id eos_token_id hidden_act initializer_range intermediate_size max_window_layers
        num_key_value_heads pad_token_id rms_norm_eps tie_word_embeddings use_cache use_sliding_window vocab_size
        """.split()
    ),
    "qwen3": frozenset(
        """
        attention_bias attention_dropout bos_token_id eos_token_id hidden_act initializer_range intermediate_size
        max_window_layers num_key_value_heads pad_token_id rms_norm_eps tie_word_embeddings use_cache use_sliding_window
        vocab_size
        """.split()
    ),
    "qwen3_5_moe_text": frozenset(
        """
        attention_bias attention_dropout bos_token_id cu_seq_lens_q depth eos_token_id full_attention_interval get
        hidden_act image_token_id in_channels initializer_range intermediate_size linear_conv_kernel_dim
        linear_key_head_dim linear_num_key_heads linear_num_value_heads linear_value_head_dim moe_intermediate_size
        num_experts num_experts_per_tok num_heads num_key_value_heads num_position_embeddings out_hidden_size
        output_router_logits pad_token_id patch_size rms_norm_eps router_aux_loss_coef shared_expert_intermediate_size
        spatial_merge_size temporal_patch_size text_config tie_word_embeddings use_cache video_token_id vision_config
        vocab_size
        """.split()
    ),
    "qwen3_5_text": frozenset(
        """
        attention_bias attention_dropout bos_token_id cu_seq_lens_q depth eos_token_id full_attention_interval get
        hidden_act image_token_id in_channels initializer_range intermediate_size linear_conv_kernel_dim
        linear_key_head_dim linear_num_key_heads linear_num_value_heads linear_value_head_dim num_heads
        num_key_value_heads num_position_embeddings out_hidden_size pad_token_id patch_size rms_norm_eps
        spatial_merge_size temporal_patch_size text_config tie_word_embeddings use_cache video_token_id vision_config
        vocab_size
        """.split()
    ),
    "qwen3_moe": frozenset(
        """
        attention_bias attention_dropout bos_token_id decoder_sparse_step eos_token_id hidden_act initializer_range
        intermediate_size mlp_only_layers moe_intermediate_size norm_topk_prob num_experts num_experts_per_tok
        num_key_value_heads output_router_logits pad_token_id rms_norm_eps router_aux_loss_coef tie_word_embeddings
        use_cache use_sliding_window vocab_size
        """.split()
    ),
    "qwen3_next": frozenset(
        """
        attention_bias attention_dropout bos_token_id cu_seq_lens_q decoder_sparse_step eos_token_id
        full_attention_interval hidden_act initializer_range intermediate_size linear_conv_kernel_dim
        linear_key_head_dim linear_num_key_heads linear_num_value_heads linear_value_head_dim mlp_only_layers
        moe_intermediate_size norm_topk_prob num_experts num_experts_per_tok num_key_value_heads output_router_logits
        pad_token_id rms_norm_eps router_aux_loss_coef shared_expert_intermediate_size tie_word_embeddings use_cache
        vocab_size
        """.split()
    ),
    "smollm3": frozenset(
        """
        attention_bias attention_dropout bos_token_id eos_token_id hidden_act initializer_range intermediate_size
        mlp_bias no_rope_layer_interval no_rope_layers num_key_value_heads pad_token_id rms_norm_eps tie_word_embeddings
        use_cache use_sliding_window vocab_size
        """.split()
    ),
    "stablelm": frozenset(
        """
        attention_dropout bos_token_id eos_token_id hidden_act hidden_dropout initializer_range intermediate_size
        layer_norm_eps num_key_value_heads pad_token_id qk_layernorm tie_word_embeddings use_cache use_parallel_residual
        use_qkv_bias vocab_size
        """.split()
    ),
    "starcoder2": frozenset(
        """
        attention_dropout bos_token_id embedding_dropout eos_token_id hidden_act initializer_range intermediate_size
        norm_epsilon num_key_value_heads pad_token_id residual_dropout tie_word_embeddings use_bias use_cache vocab_size
        """.split()
    ),
}
