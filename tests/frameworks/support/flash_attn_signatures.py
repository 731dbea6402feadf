"""The signatures of FlashAttention's functions: names, order and defaults, as FlashAttention 2.8, FlashAttention 3, vLLM and SGLang
have them."""

# fmt: off
import torch


class FlashAttention2:
    """flash_attn.flash_attn_interface"""

    def flash_attn_func(q, k, v, dropout_p=0.0, softmax_scale=None, causal=False, window_size=(-1, -1), softcap=0.0, alibi_slopes=None,
                        deterministic=False, return_attn_probs=False): ...

    def flash_attn_kvpacked_func(q, kv, dropout_p=0.0, softmax_scale=None, causal=False, window_size=(-1, -1), softcap=0.0,
                                 alibi_slopes=None, deterministic=False, return_attn_probs=False): ...

    def flash_attn_qkvpacked_func(qkv, dropout_p=0.0, softmax_scale=None, causal=False, window_size=(-1, -1), softcap=0.0,
                                  alibi_slopes=None, deterministic=False, return_attn_probs=False): ...

    def flash_attn_varlen_func(q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p=0.0, softmax_scale=None,
                               causal=False, window_size=(-1, -1), softcap=0.0, alibi_slopes=None, deterministic=False,
                               return_attn_probs=False, block_table=None): ...

    def flash_attn_varlen_kvpacked_func(q, kv, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p=0.0,
                                        softmax_scale=None, causal=False, window_size=(-1, -1), softcap=0.0, alibi_slopes=None,
                                        deterministic=False, return_attn_probs=False): ...

    def flash_attn_varlen_qkvpacked_func(qkv, cu_seqlens, max_seqlen, dropout_p=0.0, softmax_scale=None, causal=False,
                                         window_size=(-1, -1), softcap=0.0, alibi_slopes=None, deterministic=False,
                                         return_attn_probs=False): ...

    def flash_attn_with_kvcache(q, k_cache, v_cache, k=None, v=None, rotary_cos=None, rotary_sin=None, cache_seqlens=None,
                                cache_batch_idx=None, cache_leftpad=None, block_table=None, softmax_scale=None, causal=False,
                                window_size=(-1, -1), softcap=0.0, rotary_interleaved=True, alibi_slopes=None, num_splits=0,
                                return_softmax_lse=False): ...


class BertPadding:
    """flash_attn.bert_padding"""

    def unpad_input(hidden_states, attention_mask, unused_mask=None): ...

    def unpad_input_for_concatenated_sequences(hidden_states, attention_mask_in_length): ...

    def pad_input(hidden_states, indices, batch, seqlen): ...


class Rotary:
    """flash_attn.layers.rotary"""

    def rotate_half(x, interleaved=False): ...

    def apply_rotary_emb_torch(x, cos, sin, interleaved=False): ...

    def apply_rotary_emb(x, cos, sin, interleaved=False, inplace=False, seqlen_offsets=0, cu_seqlens=None, max_seqlen=None): ...

    def apply_rotary_emb_func(x, cos, sin, interleaved=False, inplace=False, seqlen_offsets=0, cu_seqlens=None, max_seqlen=None): ...

    def apply_rotary_emb_qkv_(qkv, cos, sin, cos_k=None, sin_k=None, interleaved=False, seqlen_offsets=0, num_heads_q=None): ...

    def apply_rotary_emb_kv_(kv, cos, sin, interleaved=False, seqlen_offsets=0): ...

    def RotaryEmbedding(dim, base=10000.0, interleaved=False, scale_base=None, device=None): ...


class FlashAttention3:
    """flash_attn_interface"""

    def flash_attn_func(q, k, v, softmax_scale=None, causal=False, qv=None, q_descale=None, k_descale=None, v_descale=None,
                        window_size=(-1, -1), attention_chunk=0, softcap=0.0, num_splits=1, pack_gqa=None, deterministic=False,
                        sm_margin=0, return_attn_probs=False): ...

    def flash_attn_qkvpacked_func(qkv, softmax_scale=None, causal=False, q_descale=None, k_descale=None, v_descale=None,
                                  window_size=(-1, -1), attention_chunk=0, softcap=0.0, deterministic=False, num_heads_q=None,
                                  sm_margin=0, return_attn_probs=False): ...

    def flash_attn_varlen_func(q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, seqused_q=None, seqused_k=None,
                               softmax_scale=None, causal=False, qv=None, q_descale=None, k_descale=None, v_descale=None,
                               window_size=(-1, -1), attention_chunk=0, softcap=0.0, num_splits=1, pack_gqa=None, deterministic=False,
                               sm_margin=0, return_attn_probs=False): ...

    def flash_attn_combine(out_partial, lse_partial, out=None, out_dtype=None): ...

    def flash_attn_with_kvcache(q, k_cache, v_cache, k=None, v=None, qv=None, rotary_cos=None, rotary_sin=None, cache_seqlens=None,
                                cache_batch_idx=None, cache_leftpad=None, page_table=None, cu_seqlens_q=None, cu_seqlens_k_new=None,
                                max_seqlen_q=None, rotary_seqlens=None, q_descale=None, k_descale=None, v_descale=None,
                                softmax_scale=None, causal=False, window_size=(-1, -1), attention_chunk=0, softcap=0.0,
                                rotary_interleaved=True, scheduler_metadata=None, num_splits=0, pack_gqa=None, sm_margin=0,
                                return_softmax_lse=False): ...

    def get_scheduler_metadata(batch_size, max_seqlen_q, max_seqlen_k, num_heads_q, num_heads_kv, headdim, cache_seqlens,
                               qkv_dtype=torch.bfloat16, headdim_v=None, cu_seqlens_q=None, cu_seqlens_k_new=None, cache_leftpad=None,
                               page_size=None, max_seqlen_k_new=0, causal=False, window_size=(-1, -1), attention_chunk=0,
                               has_softcap=False, num_splits=0, pack_gqa=None, sm_margin=0): ...


class VllmFlashAttention:
    """vllm.vllm_flash_attn"""

    def flash_attn_varlen_func(q, k, v, max_seqlen_q, cu_seqlens_q, max_seqlen_k, cu_seqlens_k=None, seqused_k=None, q_v=None,
                               dropout_p=0.0, softmax_scale=None, causal=False, window_size=None, softcap=0.0, alibi_slopes=None,
                               deterministic=False, return_attn_probs=False, block_table=None, return_softmax_lse=False, out=None,
                               scheduler_metadata=None, q_descale=None, k_descale=None, v_descale=None, num_splits=0,
                               output_scale=None, fa_version=2, s_aux=None, cp_world_size=1, cp_rank=0, cp_tot_seqused_k=None,
                               mask_mod=None, block_sparse_tensors=None, aux_tensors=None, aux_tensor_leading_dims=None,
                               dynamic_causal=None): ...

    def get_scheduler_metadata(batch_size, max_seqlen_q, max_seqlen_k, num_heads_q, num_heads_kv, headdim, cache_seqlens,
                               qkv_dtype=torch.bfloat16, headdim_v=None, cu_seqlens_q=None, cu_seqlens_k_new=None, cache_leftpad=None,
                               page_size=None, max_seqlen_k_new=0, causal=False, window_size=(-1, -1), has_softcap=False, num_splits=0,
                               pack_gqa=None, sm_margin=0): ...

    def is_fa_version_supported(fa_version, device=None): ...

    def fa_version_unsupported_reason(fa_version, device=None): ...


class SglFlashAttention:
    """sglang.jit_kernel.flash_attention"""

    def flash_attn_with_kvcache(q, k_cache, v_cache, k=None, v=None, qv=None, rotary_cos=None, rotary_sin=None, cache_seqlens=None,
                                cache_batch_idx=None, cache_leftpad=None, page_table=None, cu_seqlens_q=None, cu_seqlens_k_new=None,
                                max_seqlen_q=None, rotary_seqlens=None, q_descale=None, k_descale=None, v_descale=None,
                                softmax_scale=None, causal=False, window_size=(-1, -1), attention_chunk=None, softcap=0.0,
                                rotary_interleaved=True, scheduler_metadata=None, num_splits=0, pack_gqa=None, sm_margin=0,
                                return_softmax_lse=False, sinks=None, score_mod=None, aux_tensors=None, ver=3): ...

    def flash_attn_varlen_func(q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q=None, max_seqlen_k=None, seqused_q=None, seqused_k=None,
                               page_table=None, softmax_scale=None, causal=False, qv=None, q_descale=None, k_descale=None,
                               v_descale=None, window_size=(-1, -1), attention_chunk=0, softcap=0.0, num_splits=1, pack_gqa=None,
                               sm_margin=0, return_softmax_lse=False, sinks=None, score_mod=None, aux_tensors=None, ver=3): ...

    def is_fa3_supported(device=None): ...
