"""Calls over sequences, for the tests of frameworks."""

H, HK, D, DV = 4, 2, 8, 6

#: name: (rows of q and rows of k of each sequence, storage of q, storage of k, options, names of more arrays). Rows are (begin, end)
#: among all rows of a packed array, or those of the sequence's own room; "single": one query each.
CALLS = {
    "packed": ([(0, 3), (3, 4), (4, 9)], [(0, 3), (3, 4), (4, 9)], "packed", "packed", {"causal": "bottom_right"}, ()),
    "cross": ([(0, 3), (3, 3), (3, 8), (8, 9)], [(0, 5), (5, 7), (7, 7), (7, 9)], "packed", "packed", {}, ()),
    "gaps": ([(2, 5), (6, 8)], [(1, 5), (7, 10)], "packed used", "packed used", {"causal": "top_left", "window": (2, None)}, ()),
    "padded": ([(0, 4), (0, 0), (0, 2)], [(0, 2), (0, 3), (0, 6)], "padded", "padded", {"causal": "bottom_right"}, ()),
    "bshd": ([(0, 4), (0, 1), (0, 2)], [(0, 2), (0, 0), (0, 6)], "padded", "padded", {"layout": "bshd", "window": (3, 1)}, ()),
    "packed queries": ([(0, 2), (2, 5)], [(0, 4), (0, 2)], "packed", "padded", {"softcap": 0.7, "layout": "bshd"}, ("sinks",)),
    "packed keys": ([(0, 2), (0, 5)], [(0, 4), (4, 6)], "padded", "packed", {"scale": 0.3}, ("alibi of each",)),
    "single": ([(0, 1), (1, 2), (2, 3)], [(0, 4), (0, 1), (0, 5)], "single", "padded", {}, ("sinks",)),
    "bias": ([(0, 4), (0, 3)], [(0, 5), (0, 2)], "padded", "padded", {"causal": "bottom_right"}, ("bias", "mask")),
    "bias of a head": ([(0, 4), (0, 3)], [(0, 5), (0, 2)], "padded", "padded", {"layout": "bshd"}, ("bias of a head",)),
    "range": ([(0, 4), (4, 7)], [(0, 5), (5, 9)], "packed", "packed", {"causal": "bottom_right", "window": (2, None)}, ("k_range",)),
    "positions": ([(0, 4), (4, 7)], [(0, 5), (5, 9)], "packed", "packed", {"causal": "bottom_right"}, ("positions", "alibi")),
    "all": ([(1, 4), (4, 5), (7, 10)], [(0, 5), (6, 7), (7, 11)], "packed used", "packed used",
            {"causal": "bottom_right", "window": (3, None), "softcap": 0.9, "scale": 0.5}, ("sinks", "alibi")),
}  # fmt: skip
#: Those whose sequences are dense calls.
DENSE = [name for name, call in CALLS.items() if not {"k_range", "positions"} & set(call[5])]
