"""The names under which SGLang's CPU code looks for its kernels; see draftline_sglang_cpu."""

import torch
from draftline_sglang_cpu.attention import decode_attention, extend_attention
from draftline_sglang_cpu.slots import assign_draft_cache_locs_contiguous as assign_draft_cache_locs_contiguous_cpu
from draftline_sglang_cpu.slots import assign_extend_cache_locs as assign_extend_cache_locs_cpu
from draftline_sglang_cpu.slots import assign_req_to_token_pool as assign_req_to_token_pool_cpu
from draftline_sglang_cpu.slots import build_draft_decode_metadata as build_draft_decode_metadata_cpu
from draftline_sglang_cpu.slots import copy_all_layer_kv_cache as copy_all_layer_kv_cache_cpu
from draftline_sglang_cpu.slots import fill_accept_out_cache_loc as fill_accept_out_cache_loc_cpu
from draftline_sglang_cpu.slots import fill_bonus_tokens as fill_bonus_tokens_cpu
from draftline_sglang_cpu.slots import rotate_input_ids as rotate_input_ids_cpu
from draftline_sglang_cpu.tree import build_tree as build_tree_kernel_efficient_cpu
from draftline_sglang_cpu.tree import verify_greedy as verify_tree_greedy_cpu

__all__ = [
    "assign_draft_cache_locs_contiguous_cpu",
    "assign_extend_cache_locs_cpu",
    "assign_req_to_token_pool_cpu",
    "build_draft_decode_metadata_cpu",
    "build_tree_kernel_efficient_cpu",
    "copy_all_layer_kv_cache_cpu",
    "fill_accept_out_cache_loc_cpu",
    "fill_bonus_tokens_cpu",
    "rotate_input_ids_cpu",
    "verify_tree_greedy_cpu",
]

# The intel_amx backend takes these two from torch's own table of operators.
torch.ops.sgl_kernel.decode_attention_cpu = decode_attention
torch.ops.sgl_kernel.extend_attention_cpu = extend_attention
