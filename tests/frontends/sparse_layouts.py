"""Settings of block-sparse layouts, and digests of what DeepSpeed's ``make_layout`` returns for them.

The digests were made with DeepSpeed 0.16.4, with ``num_random_blocks=0`` where blocks are random: its own come from
Python's global generator.
"""

from __future__ import annotations

import hashlib
from typing import Any

import torch

BI, UNI = "bidirectional", "unidirectional"

#: Name: class without "SparsityConfig", arguments, tokens.
Setting = tuple[str, dict[str, Any], int]

SETTINGS: dict[str, Setting] = {
    "dense": ("Dense", {"num_heads": 2, "block": 4}, 32),
    "dense, a block": ("Dense", {"num_heads": 3, "block": 8, "different_layout_per_head": True}, 8),
    "fixed": ("Fixed", {"num_heads": 2, "block": 4}, 64),
    "fixed, 16 tokens": ("Fixed", {"num_heads": 1}, 256),
    "fixed, short last window": ("Fixed", {"num_heads": 2, "block": 4}, 40),
    "fixed, last window of a block": ("Fixed", {"num_heads": 2, "block": 4}, 36),
    "fixed, one short window": ("Fixed", {"num_heads": 2, "block": 4}, 12),
    "fixed, uni": ("Fixed", {"num_heads": 2, "block": 4, "attention": UNI}, 64),
    "fixed, uni, short": ("Fixed", {"num_heads": 2, "block": 4, "attention": UNI}, 44),
    "fixed, uni, 2 global": (
        "Fixed",
        {"num_heads": 2, "block": 4, "num_local_blocks": 6, "num_global_blocks": 2, "attention": UNI},
        80,
    ),
    "fixed, 2 global, short": (
        "Fixed",
        {"num_heads": 2, "block": 4, "num_local_blocks": 4, "num_global_blocks": 2},
        52,
    ),
    "fixed, horizontal": ("Fixed", {"num_heads": 2, "block": 4, "horizontal_global_attention": True}, 64),
    "fixed, horizontal, 2 global, short": (
        "Fixed",
        {"num_heads": 2, "block": 4, "num_global_blocks": 2, "horizontal_global_attention": True},
        56,
    ),
    "fixed, 4 patterns": (
        "Fixed",
        {"num_heads": 6, "block": 4, "different_layout_per_head": True, "num_different_global_patterns": 4},
        64,
    ),
    "fixed, 4 patterns, uni, short": (
        "Fixed",
        {
            "num_heads": 4,
            "block": 4,
            "different_layout_per_head": True,
            "num_different_global_patterns": 4,
            "attention": UNI,
        },
        56,
    ),
    "fixed, 2 patterns of 2, horizontal": (
        "Fixed",
        {
            "num_heads": 3,
            "block": 4,
            "different_layout_per_head": True,
            "num_global_blocks": 2,
            "num_different_global_patterns": 2,
            "horizontal_global_attention": True,
        },
        60,
    ),
    "fixed, per head, 1 pattern": ("Fixed", {"num_heads": 3, "block": 4, "different_layout_per_head": True}, 32),
    "fixed, window of a block": ("Fixed", {"num_heads": 2, "block": 4, "num_local_blocks": 1, "attention": UNI}, 24),
    "fixed, all of the window global": (
        "Fixed",
        {"num_heads": 1, "block": 4, "num_local_blocks": 3, "num_global_blocks": 3, "attention": UNI},
        40,
    ),
    "variable": ("Variable", {"num_heads": 2, "block": 4}, 48),
    "variable, uni": ("Variable", {"num_heads": 2, "block": 4, "attention": UNI}, 48),
    "variable, windows": ("Variable", {"num_heads": 2, "block": 4, "local_window_blocks": [1, 3, 2]}, 60),
    "variable, windows, uni": (
        "Variable",
        {"num_heads": 2, "block": 4, "local_window_blocks": [2, 5], "attention": UNI},
        64,
    ),
    "variable, windows beyond the end": (
        "Variable",
        {"num_heads": 2, "block": 4, "local_window_blocks": [3, 9, 2]},
        32,
    ),
    "variable, globals": ("Variable", {"num_heads": 2, "block": 4, "global_block_indices": [1, 5, 70]}, 48),
    "variable, no globals": ("Variable", {"num_heads": 2, "block": 4, "global_block_indices": []}, 40),
    "variable, globals, uni": (
        "Variable",
        {"num_heads": 2, "block": 4, "global_block_indices": [0, 6], "attention": UNI},
        48,
    ),
    "variable, spans": (
        "Variable",
        {"num_heads": 2, "block": 4, "global_block_indices": [1, 6, 40], "global_block_end_indices": [3, 60, 41]},
        48,
    ),
    "variable, spans, uni": (
        "Variable",
        {
            "num_heads": 2,
            "block": 4,
            "global_block_indices": [2, 7],
            "global_block_end_indices": [4, 8],
            "attention": UNI,
        },
        48,
    ),
    "variable, horizontal": (
        "Variable",
        {"num_heads": 2, "block": 4, "global_block_indices": [3, 4], "horizontal_global_attention": True},
        48,
    ),
    "variable, spans, horizontal": (
        "Variable",
        {
            "num_heads": 2,
            "block": 4,
            "global_block_indices": [0, 8],
            "global_block_end_indices": [2, 30],
            "horizontal_global_attention": True,
        },
        40,
    ),
    "variable, random": ("Variable", {"num_heads": 2, "block": 4, "num_random_blocks": 2}, 64),
    "variable, random per head, uni": (
        "Variable",
        {
            "num_heads": 3,
            "block": 4,
            "different_layout_per_head": True,
            "num_random_blocks": 3,
            "local_window_blocks": [2],
            "attention": UNI,
        },
        64,
    ),
    "bigbird": ("BigBird", {"num_heads": 2, "block": 4}, 64),
    "bigbird, uni": ("BigBird", {"num_heads": 2, "block": 4, "attention": UNI}, 64),
    "bigbird, per head": (
        "BigBird",
        {
            "num_heads": 3,
            "block": 4,
            "different_layout_per_head": True,
            "num_random_blocks": 2,
            "num_sliding_window_blocks": 5,
            "num_global_blocks": 2,
        },
        80,
    ),
    "bigbird, per head, uni": (
        "BigBird",
        {"num_heads": 3, "block": 4, "different_layout_per_head": True, "num_random_blocks": 3, "attention": UNI},
        64,
    ),
    "bigbird, no random": ("BigBird", {"num_heads": 2, "block": 4, "num_random_blocks": 0}, 48),
    "bigbird, no random, even window": (
        "BigBird",
        {"num_heads": 2, "block": 4, "num_random_blocks": 0, "num_sliding_window_blocks": 4, "num_global_blocks": 3},
        48,
    ),
    "longformer": ("BSLongformer", {"num_heads": 2, "block": 4}, 64),
    "longformer, uni": ("BSLongformer", {"num_heads": 2, "block": 4, "attention": UNI}, 64),
    "longformer, window of 1": ("BSLongformer", {"num_heads": 2, "block": 4, "num_sliding_window_blocks": 1}, 32),
    "longformer, window of 6": ("BSLongformer", {"num_heads": 2, "block": 4, "num_sliding_window_blocks": 6}, 48),
    "longformer, globals": ("BSLongformer", {"num_heads": 2, "block": 4, "global_block_indices": [0, 7, 90]}, 64),
    "longformer, no globals": ("BSLongformer", {"num_heads": 2, "block": 4, "global_block_indices": []}, 32),
    "longformer, spans": (
        "BSLongformer",
        {"num_heads": 2, "block": 4, "global_block_indices": [2, 10], "global_block_end_indices": [4, 99]},
        48,
    ),
    "longformer, spans, uni, per head": (
        "BSLongformer",
        {
            "num_heads": 3,
            "block": 4,
            "different_layout_per_head": True,
            "global_block_indices": [2, 10],
            "global_block_end_indices": [4, 12],
            "attention": UNI,
        },
        64,
    ),
    "local": ("LocalSlidingWindow", {"num_heads": 2, "block": 4}, 48),
    "local, window of 1": ("LocalSlidingWindow", {"num_heads": 2, "block": 4, "num_sliding_window_blocks": 1}, 16),
    "local, window of 4": ("LocalSlidingWindow", {"num_heads": 2, "block": 4, "num_sliding_window_blocks": 4}, 48),
    "local, bi": ("LocalSlidingWindow", {"num_heads": 2, "block": 4, "attention": BI}, 48),
    "local, bi, window of 7": (
        "LocalSlidingWindow",
        {"num_heads": 2, "block": 4, "num_sliding_window_blocks": 7, "attention": BI},
        64,
    ),
}


def random_blocks_of(setting: Setting) -> int:
    """Random blocks in a row."""
    return int(setting[1].get("num_random_blocks", 1 if setting[0] == "BigBird" else 0))


def without_random_blocks(setting: Setting) -> Setting:
    name, arguments, tokens = setting
    return (name, {**arguments, "num_random_blocks": 0}, tokens) if random_blocks_of(setting) else setting


def digest(layout: torch.Tensor) -> str:
    """Of shape and values, the first 16 digits."""
    data = bytes(str(tuple(layout.shape)), "ascii") + bytes(layout.to(torch.uint8).flatten().tolist())
    return hashlib.sha256(data).hexdigest()[:16]


DIGESTS = {
    "dense": "1a96a050d734c7cf",
    "dense, a block": "008f282079c9c1d6",
    "fixed": "f549ff5c41d215a1",
    "fixed, 16 tokens": "b992ff8884f35509",
    "fixed, short last window": "927cfed216d67471",
    "fixed, last window of a block": "80e509d926563f95",
    "fixed, one short window": "c2de54ebbfb3a758",
    "fixed, uni": "1e74e6fb5463a7e2",
    "fixed, uni, short": "ff6a233450812c59",
    "fixed, uni, 2 global": "5489ee19d831bccc",
    "fixed, 2 global, short": "11edab27489db4bb",
    "fixed, horizontal": "846a97ebc0b3b96a",
    "fixed, horizontal, 2 global, short": "6d7a45b170b6d585",
    "fixed, 4 patterns": "f47dae01ca733800",
    "fixed, 4 patterns, uni, short": "2b5681742c17cb55",
    "fixed, 2 patterns of 2, horizontal": "6ba5d08357380d22",
    "fixed, per head, 1 pattern": "6f9ec05411c9385d",
    "fixed, window of a block": "8947184008a45556",
    "fixed, all of the window global": "9da78a29ca5cd770",
    "variable": "31c7643e91be366e",
    "variable, uni": "ca36259acf126e68",
    "variable, windows": "8bc2dd45467437eb",
    "variable, windows, uni": "6e8a864fae0114df",
    "variable, windows beyond the end": "0b2284d1929c479a",
    "variable, globals": "8969d222e3b589be",
    "variable, no globals": "d607b1f763f9fd13",
    "variable, globals, uni": "e23a688a8905d272",
    "variable, spans": "055a34eb37c96b03",
    "variable, spans, uni": "ab413f530b9ad54e",
    "variable, horizontal": "96274c676075c5fa",
    "variable, spans, horizontal": "d93eb6375799bb41",
    "variable, random": "f5d0856043ef4fa4",
    "variable, random per head, uni": "ffae57a12dd2e0a2",
    "bigbird": "372715bba8c1dc17",
    "bigbird, uni": "ff5cc09ffa092450",
    "bigbird, per head": "39709f07d8a72969",
    "bigbird, per head, uni": "aa4a20401dbf667e",
    "bigbird, no random": "bf5745581e012727",
    "bigbird, no random, even window": "6da9bcb51aa082a4",
    "longformer": "372715bba8c1dc17",
    "longformer, uni": "ff5cc09ffa092450",
    "longformer, window of 1": "56646669a5d5932d",
    "longformer, window of 6": "29bab6d06839a13e",
    "longformer, globals": "92a454ae91ff7345",
    "longformer, no globals": "875549b458f69596",
    "longformer, spans": "907db766aeafcb78",
    "longformer, spans, uni, per head": "dd5f8001e5ba6767",
    "local": "035ab2bde2484972",
    "local, window of 1": "1c01eaaeacf4afd4",
    "local, window of 4": "4963f05fc9f325cb",
    "local, bi": "541187bde2cc94f5",
    "local, bi, window of 7": "17c837cb11a0924e",
}
