"""What the unmodified sglang 0.5.23 wheel lacks on a CPU without AMX.

The wheel's CPU code calls compiled kernels that no wheel of this machine carries. Here are those that text models and EAGLE-3
need, in plain torch: attention over the paged cache (attention.py), the tree of drafted tokens and its verification (tree.py),
and the bookkeeping of cache slots (slots.py). standins/sgl_kernel gives them the names SGLang imports; standins/torchvision and
standins/triton satisfy imports of code that a text model on a CPU never runs. Correct and slow: meant to judge drafts, not to
serve traffic. Never install this beside a GPU build of SGLang: its `sgl_kernel` and `triton` would hide the real ones.
"""

SGLANG_VERSION = "0.5.23"  # whose calls these signatures follow
