"""Tensors that the core cannot read: sparse, nested, on no device, a transform's. Each is named, described and refused."""

import pytest

torch = pytest.importorskip("torch")

import fa_ext  # noqa: E402
from torch._subclasses.fake_tensor import FakeTensorMode  # noqa: E402

SHAPE = (1, 2, 4, 8)
WHERE = "accepted: a dense array that has memory \\(in transforms and compiled graphs: fa_ext.torch\\)$"


def nested(layout):
    return torch.nested.nested_tensor([torch.zeros(2, 3, 8), torch.zeros(2, 5, 8)], layout=layout)


def sparse(layout):
    return torch.zeros(4, 4).to_sparse(layout=layout)


#: The maker of the tensor, and what is said of it.
UNREADABLE = {
    "coo": (lambda: sparse(torch.sparse_coo), "a Tensor, layout torch.sparse_coo, device cpu"),
    "csr": (lambda: sparse(torch.sparse_csr), "a Tensor, layout torch.sparse_csr, device cpu"),
    "csc": (lambda: sparse(torch.sparse_csc), "a Tensor, layout torch.sparse_csc, device cpu"),
    "jagged": (lambda: nested(torch.jagged), "a NestedTensor, layout torch.jagged, device cpu"),
    "nested": (lambda: nested(torch.strided), "a Tensor, layout torch.strided, device cpu"),
    "meta": (lambda: torch.empty(SHAPE, device="meta"), "a Tensor, layout torch.strided, device meta"),
}


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("kind", UNREADABLE)
@pytest.mark.parametrize("name", ["q", "v", "mask", "bias", "out", "seqlens_k", "workspace"])
def test_what_cannot_be_read(name, kind):
    make, given = UNREADABLE[kind]
    arguments = {n: torch.zeros(SHAPE) for n in "qkv"} | {name: make()}
    with pytest.raises(BufferError, match=f"^{name} cannot be read: .+; given: {given}; {WHERE}"):
        fa_ext.attention(**arguments)


def test_a_transform():
    q, k, v = (torch.zeros(2, *SHAPE) for _ in range(3))
    with pytest.raises(BufferError, match=f"^q cannot be read: .+; given: a Tensor, .*; {WHERE}"):
        torch.vmap(fa_ext.attention)(q, k, v)


@pytest.mark.filterwarnings("ignore")
def test_a_tensor_without_memory():
    with FakeTensorMode():
        fake = torch.empty(SHAPE)
    with pytest.raises(BufferError, match="k has a NULL data pointer, but it is not empty; accepted: an array that has memory"):
        fa_ext.attention(torch.zeros(SHAPE), fake, torch.zeros(SHAPE))
