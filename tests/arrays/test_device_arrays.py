"""Device arrays in and out: torch, CuPy, JAX, Numba and our own; streams, graph capture, threads, forks.

Results are held against the same call on NumPy arrays; the kernels themselves are judged in test_contract.py.
"""

import gc
import os
import threading

import numpy as np
import pytest

import fa_ext
from tests.arrays.producers import Interface, ran_alone

pytestmark = pytest.mark.gpu
SHAPE = (2, 4, 33, 64)
CYCLES = 100_000_000  # a delay of some 50 ms


@pytest.fixture(scope="module")
def host():
    random = np.random.default_rng(0)
    return [random.standard_normal(SHAPE).astype(np.float16) for _ in range(3)]


@pytest.fixture(scope="module")
def wanted(host):
    return fa_ext.attention(*(array.astype(np.float32) for array in host), return_lse=True)


@pytest.fixture(scope="module")
def torch():
    module = pytest.importorskip("torch")
    if not module.cuda.is_available():
        pytest.skip("torch has no CUDA")
    return module


@pytest.fixture(scope="module")
def cupy():
    return pytest.importorskip("cupy")


@pytest.fixture(scope="module")
def jax():
    module = pytest.importorskip("jax")
    if module.default_backend() != "gpu":
        pytest.skip("JAX has no GPU")
    return module


@pytest.fixture(scope="module")
def cuda():
    module = pytest.importorskip("numba.cuda")
    if not module.is_available():
        pytest.skip("Numba has no CUDA")
    return module


def close(given, wanted, tolerance=2e-3):
    given = fa_ext.to_numpy(given)
    assert given.shape == wanted.shape
    np.testing.assert_allclose(given.astype(np.float32), wanted, rtol=0, atol=tolerance)


# ---- our own arrays ----


def test_own(host, wanted):
    arrays = [fa_ext.to_device(array) for array in host]
    for array, source in zip(arrays, host, strict=True):
        assert isinstance(array, fa_ext.DeviceArray) and array.device == "cuda:0"
        np.testing.assert_array_equal(fa_ext.to_numpy(array), source)
    out, lse = fa_ext.attention(*arrays, return_lse=True)
    assert (type(out), out.dtype, lse.dtype) == (fa_ext.DeviceArray, "float16", "float32")
    close(out, wanted[0])
    close(lse, wanted[1])
    into = fa_ext.to_device(np.full(SHAPE, np.nan, np.float16))
    assert fa_ext.attention(*arrays, out=into) is into
    np.testing.assert_array_equal(fa_ext.to_numpy(into), fa_ext.to_numpy(out))
    interface = out.__cuda_array_interface__
    assert (interface["version"], interface["shape"], interface["typestr"]) == (3, SHAPE, "<f2")
    assert interface["stream"] and interface["data"][0]


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64", "bool"])
def test_copies(dtype):
    dtype = np.dtype(pytest.importorskip("ml_dtypes").bfloat16 if dtype == "bfloat16" else dtype)
    source = np.random.default_rng(0).standard_normal((3, 4, 5)).astype(dtype)
    for view in (source, source[::-1, :, ::2], source[:0]):
        np.testing.assert_array_equal(fa_ext.to_numpy(fa_ext.to_device(view)), view)


def test_copies_of_far_strides(cupy):
    """Elements gigabytes apart are fetched without what lies between them."""
    memory = cupy.zeros((3, 1 << 29), np.float16)
    memory[:, :5] = cupy.arange(15, dtype=np.float16).reshape(3, 5)
    for view in (memory[:, :5], memory[::-1, :5], memory[:, 4::-2], memory[:, 3], memory[1:2, :5].T):
        np.testing.assert_array_equal(fa_ext.to_numpy(view), view.get())


def test_float64_stays_on_the_cpu(host):
    arrays = [fa_ext.to_device(array.astype(np.float64)) for array in host]
    with pytest.raises(fa_ext.UnsupportedError, match="float64 runs on the CPU only"):
        fa_ext.attention(*arrays)


def test_devices_do_not_mix(host):
    q, k, v = host
    with pytest.raises(ValueError, match="k is on the CPU, but q is on CUDA device 0"):
        fa_ext.attention(fa_ext.to_device(q), k, v)
    with pytest.raises(ValueError, match="device"):
        fa_ext.to_device(q, device=999)


# ---- torch ----


@pytest.mark.parametrize("dtype, tolerance", [("float16", 2e-3), ("bfloat16", 2e-2), ("float32", 1e-3)])
def test_torch(torch, host, wanted, dtype, tolerance):
    arrays = [torch.from_numpy(array).cuda().to(getattr(torch, dtype)) for array in host]
    out, lse = fa_ext.attention(*arrays, return_lse=True)
    assert type(out) is torch.Tensor and out.dtype == arrays[0].dtype and out.device == arrays[0].device
    assert lse.dtype == torch.float32 and out.is_contiguous()
    close(out, wanted[0], tolerance)
    into = torch.full_like(out, float("nan"))
    assert fa_ext.attention(*arrays, out=into) is into
    assert torch.equal(into, out)
    pair = (torch.full_like(out, float("nan")), torch.full_like(lse, float("nan")))
    assert fa_ext.attention(*arrays, out=pair) is pair
    assert torch.equal(pair[0], out) and torch.equal(pair[1], lse)


def test_torch_results_are_contiguous(torch, host, wanted):
    """Whatever the strides of q are."""
    q, k, v = (torch.from_numpy(array).cuda() for array in host)
    wide = torch.cat([q, q], dim=-1)
    for given in (q, wide[..., :64], q.transpose(1, 2).contiguous().transpose(1, 2), torch.nn.Parameter(q, False)):
        out = fa_ext.attention(given, k, v)
        assert type(out) is torch.Tensor and out.is_contiguous()
        close(out, wanted[0])
    narrow = fa_ext.attention(q, k, v[..., :16])
    assert narrow.shape == (*SHAPE[:3], 16) and narrow.is_contiguous()
    close(narrow, wanted[0][..., :16])
    one = fa_ext.attention(q[:1, :1], k[:1, :1], v[:1, :1])
    assert one.is_contiguous()
    close(one, wanted[0][:1, :1])
    with torch.inference_mode():
        assert fa_ext.attention(q, k, v).is_inference()


def test_torch_refused(torch, host):
    q, k, v = (torch.from_numpy(array).cuda().float() for array in host)
    grad = q.clone().requires_grad_()
    with pytest.raises(ValueError, match=r"q requires grad.*detach"):
        fa_ext.attention(grad, k, v)
    with torch.no_grad():
        assert torch.equal(fa_ext.attention(grad, k, v), fa_ext.attention(q, k, v))
    with pytest.raises(ValueError, match=r"v requires grad"):
        fa_ext.attention(q, k, torch.nn.Parameter(v))
    fa_ext.attention(grad.detach(), k, v)
    imaginary = torch.randn(SHAPE, dtype=torch.complex64, device="cuda").conj().imag
    with pytest.raises(ValueError, match=r"k is a negative view.*resolve_neg"):
        fa_ext.attention(q, imaginary, v)
    with pytest.raises(ValueError, match=r"bias is a negative view"):
        fa_ext.attention(q, k, v, bias=imaginary[0, 0, 0, 0])
    fa_ext.attention(q, imaginary.resolve_neg(), v)
    with pytest.raises(ValueError, match=r"q is a conjugate view.*resolve_conj"):
        fa_ext.attention(torch.randn(SHAPE, dtype=torch.complex64, device="cuda").conj(), k, v)
    with pytest.raises(TypeError, match="q has dtype int64"):
        fa_ext.attention(q.long(), k, v)
    for odd in (q.to_sparse(), q.to("meta")):
        with pytest.raises((RuntimeError, TypeError, ValueError, BufferError)):
            fa_ext.attention(odd, k, v)


def test_torch_tensors_without_memory(torch):
    dense = torch.zeros((1, 2, 8, 8), device="cuda", dtype=torch.float16)
    for odd in (dense.to_sparse(), torch.empty_like(dense, device="meta")):
        with pytest.raises(BufferError, match="k cannot be read"):
            fa_ext.attention(dense, odd, dense)


def test_torch_streams(torch, host, wanted):
    """A call waits for what another stream still computes, and what comes after waits for the call."""
    sources = [torch.from_numpy(array).cuda() for array in host]
    arrays = [torch.zeros_like(source) for source in sources]
    out = torch.zeros_like(arrays[0])
    torch.cuda.synchronize()
    side, other = torch.cuda.Stream(), torch.cuda.Stream()
    with torch.cuda.stream(side):
        torch.cuda._sleep(CYCLES)
        for array, source in zip(arrays, sources, strict=True):
            array.copy_(source)
        fa_ext.attention(*arrays, out=out)  # on the current stream
        seen = out.clone()
    side.synchronize()
    close(seen, wanted[0])

    for given in (other, other.cuda_stream):
        for array in (*arrays, out):
            array.zero_()
        torch.cuda.synchronize()
        with torch.cuda.stream(side):
            torch.cuda._sleep(CYCLES)
            for array, source in zip(arrays, sources, strict=True):
                array.copy_(source)
            with torch.cuda.stream(other):
                torch.cuda._sleep(CYCLES)
            fa_ext.attention(*arrays, out=out, stream=given)
            seen = out.clone()  # on `side`, which waits for `other`
        side.synchronize()
        close(seen, wanted[0])
    for given in (0, 1, 2, torch.cuda.current_stream().cuda_stream):  # the last is 0, on the default stream
        close(fa_ext.attention(*sources, stream=given), wanted[0])


def test_torch_graph(torch, host, wanted):
    arrays = [torch.from_numpy(array).cuda() for array in host]
    out = torch.empty_like(arrays[0])
    fa_ext.attention(*arrays, out=out)
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        fa_ext.attention(*arrays, out=out)
        new = fa_ext.attention(*arrays)
    for _ in range(2):
        out.fill_(float("nan"))
        new.fill_(float("nan"))
        graph.replay()
        torch.cuda.synchronize()
        close(out, wanted[0])
        close(new, wanted[0])


def test_torch_without_the_exchange_api(torch, host, wanted):
    class Hidden:
        def __get__(self, object, owner):
            raise AttributeError("not in this version")

    class Older(torch.Tensor):
        __dlpack_c_exchange_api__ = Hidden()

    arrays = [torch.from_numpy(array).cuda().as_subclass(Older) for array in host]
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        torch.cuda._sleep(CYCLES)
        shifted = [array + 0 for array in arrays]
        out, lse = fa_ext.attention(*shifted, return_lse=True)
        seen = out.clone()
    side.synchronize()
    assert isinstance(out, torch.Tensor) and out.dtype == torch.float16 and lse.dtype == torch.float32
    close(seen.as_subclass(torch.Tensor), wanted[0])
    into = torch.empty_like(arrays[0])
    assert fa_ext.attention(*arrays, out=into) is into
    close(into.as_subclass(torch.Tensor), wanted[0])


def test_torch_memory_is_reused(torch, host):
    """Results come from torch's own allocator, and go back to it."""
    arrays = [torch.from_numpy(array).cuda() for array in host]
    fa_ext.attention(*arrays)
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    held = fa_ext.attention(*arrays)
    assert torch.cuda.memory_allocated() > before
    del held
    for _ in range(100):
        fa_ext.attention(*arrays, return_lse=True)
    assert torch.cuda.memory_allocated() == before


# ---- CuPy ----


@pytest.mark.parametrize("dtype, tolerance", [("float16", 2e-3), ("float32", 1e-3)])
def test_cupy(cupy, host, wanted, dtype, tolerance):
    arrays = [cupy.asarray(array).astype(dtype) for array in host]
    out, lse = fa_ext.attention(*arrays, return_lse=True)
    assert type(out) is cupy.ndarray and out.dtype == dtype and lse.dtype == np.float32
    close(out, wanted[0], tolerance)
    close(lse, wanted[1], 1e-2)
    into = cupy.full_like(out, np.nan)
    assert fa_ext.attention(*arrays, out=into) is into
    assert (into == out).all()
    strided = fa_ext.attention(arrays[0][::-1, :, ::2], arrays[1][::-1], arrays[2][::-1])
    close(strided, wanted[0][::-1, :, ::2], tolerance)
    empty = fa_ext.attention(arrays[0][:0], arrays[1][:0], arrays[2][:0])
    assert type(empty) is cupy.ndarray and empty.shape == (0, *SHAPE[1:])


def test_cupy_bfloat16(cupy, host, wanted):
    bfloat16 = pytest.importorskip("ml_dtypes").bfloat16
    try:
        arrays = [cupy.asarray(array.astype(bfloat16)) for array in host]
    except (TypeError, ValueError) as error:
        pytest.skip(f"this CuPy has no bfloat16: {error}")
    out = fa_ext.attention(*arrays)
    assert out.dtype == bfloat16
    close(out, wanted[0], 2e-2)


def test_cupy_streams(cupy, host, wanted):
    arrays = [cupy.asarray(array) for array in host]
    plain = fa_ext.attention(*arrays)
    stream = cupy.cuda.Stream(non_blocking=True)
    with stream:
        inside = fa_ext.attention(*arrays)
    given = fa_ext.attention(*arrays, stream=stream.ptr)
    cupy.cuda.Device().synchronize()
    assert (inside == plain).all() and (given == plain).all()
    close(plain, wanted[0])


def test_cupy_graph(cupy, host, wanted):
    arrays = [cupy.asarray(array) for array in host]
    out = cupy.empty_like(arrays[0])
    stream = cupy.cuda.Stream(non_blocking=True)
    with stream:
        fa_ext.attention(*arrays, out=out)
        stream.synchronize()
        stream.begin_capture()
        fa_ext.attention(*arrays, out=out)
        graph = stream.end_capture()
        out.fill(np.nan)
        graph.launch()
        stream.synchronize()
    close(out, wanted[0])


def test_managed_and_pinned_memory(cupy, host, wanted):
    size = host[0].nbytes
    blocks = [cupy.cuda.malloc_managed(size) for _ in host]
    arrays = [cupy.ndarray(SHAPE, np.float16, memptr=block) for block in blocks]
    for array, source in zip(arrays, host, strict=True):
        array[...] = cupy.asarray(source)
    close(fa_ext.attention(*arrays), wanted[0])
    pinned = cupy.cuda.alloc_pinned_memory(size)
    array = Interface({"shape": SHAPE, "typestr": "<f2", "data": (pinned.ptr, False), "version": 3})
    np.frombuffer(pinned, np.float16, host[0].size).reshape(SHAPE)[...] = host[0]
    np.testing.assert_array_equal(fa_ext.to_numpy(array), host[0])
    fa_ext.attention(array, host[1], host[2])  # counts as the CPU


# ---- Numba ----


def test_numba(cuda, host, wanted):
    arrays = [cuda.to_device(array) for array in host]
    out, lse = fa_ext.attention(*arrays, return_lse=True)
    assert type(out) is type(arrays[0]) and type(lse) is type(arrays[0])
    np.testing.assert_allclose(out.copy_to_host().astype(np.float32), wanted[0], rtol=0, atol=2e-3)
    into = cuda.device_array(SHAPE, np.float16)
    assert fa_ext.attention(*arrays, out=into) is into
    close(into, wanted[0])


# ---- JAX ----


@pytest.mark.parametrize("dtype, tolerance", [("float16", 2e-3), ("bfloat16", 2e-2), ("float32", 1e-3)])
def test_jax(jax, host, wanted, dtype, tolerance):
    arrays = [jax.numpy.asarray(array, dtype=dtype) for array in host]
    out, lse = fa_ext.attention(*arrays, return_lse=True)
    assert isinstance(out, jax.Array) and out.dtype == dtype and lse.dtype == "float32"
    close(out, wanted[0], tolerance)
    masked = fa_ext.attention(*arrays, mask=jax.numpy.ones((33, 33), bool))
    close(masked, wanted[0], tolerance)  # another kernel may take it, so not the same bits
    with pytest.raises(BufferError, match="out is a JAX array"):
        fa_ext.attention(*arrays, out=out)


def test_jax_memory_that_is_dropped_at_once(jax, host):
    """JAX may use the memory of an input again as soon as the call has returned."""
    arrays = [jax.numpy.asarray(array) for array in host]
    wanted = np.asarray(fa_ext.attention(*arrays))
    double = jax.jit(lambda x: x * 2 - x)
    for _ in range(50):
        out = fa_ext.attention(double(arrays[0]), double(arrays[1]), double(arrays[2]))
        noise = [jax.numpy.full(SHAPE, np.nan, "float16") for _ in range(4)]
        np.testing.assert_array_equal(np.asarray(out), wanted)
        del noise


# ---- all together ----


def test_libraries_mix(torch, cupy, host, wanted):
    q, k, v = host
    out = fa_ext.attention(cupy.asarray(q), torch.from_numpy(k).cuda(), fa_ext.to_device(v))
    assert type(out) is cupy.ndarray
    close(out, wanted[0])
    out = fa_ext.attention(torch.from_numpy(q).cuda(), fa_ext.to_device(k), cupy.asarray(v))
    assert type(out) is torch.Tensor
    close(out, wanted[0])


def test_own_array_into_other_libraries(torch, cupy, host):
    own = fa_ext.to_device(host[0])
    np.testing.assert_array_equal(torch.from_dlpack(own).cpu().numpy(), host[0])
    np.testing.assert_array_equal(cupy.from_dlpack(own).get(), host[0])
    np.testing.assert_array_equal(cupy.asarray(own).get(), host[0])
    with pytest.raises(ValueError, match="stream is 0"):
        own.__dlpack__(stream=0)
    kept = torch.from_dlpack(own)
    del own
    gc.collect()
    fa_ext.to_device(np.zeros_like(host[0]))
    np.testing.assert_array_equal(kept.cpu().numpy(), host[0])


@pytest.mark.idle
def test_own_memory_is_freed(cupy):
    host, free = np.zeros(1 << 24, np.float32), []  # 64 MiB
    for _ in range(2):
        for _ in range(100):
            fa_ext.to_device(host)
        cupy.cuda.Device().synchronize()
        free.append(cupy.cuda.runtime.memGetInfo()[0])
    assert free[0] - free[1] < 50 << 26


def test_interfaces_that_lie(cupy, host):
    q, k, v = (cupy.asarray(array) for array in host)
    base = {"shape": SHAPE, "typestr": "<f2", "data": (q.data.ptr, False), "version": 3}
    assert fa_ext.to_numpy(Interface(base)).shape == SHAPE
    for data in ((0xDEADBEEF00, False), (host[0].ctypes.data, False)):
        for place in range(3):
            arrays = [q, k, v]
            arrays[place] = Interface(base | {"data": data})
            with pytest.raises(BufferError, match="CUDA does not know the pointer"):
                fa_ext.attention(*arrays)
    with pytest.raises(ValueError, match="out is read-only"):
        fa_ext.attention(q, k, v, out=Interface(base | {"data": (cupy.empty_like(q).data.ptr, True)}))
    with pytest.raises(ValueError, match="out overlaps q"):
        fa_ext.attention(q, k, v, out=Interface(base))
    assert bool((cupy.asarray(host[0]) == q).all())


def test_threads(torch, cupy, host):
    """Torch and CuPy callers side by side, each with a stream of its own."""
    tensors = [torch.from_numpy(array).cuda() for array in host]
    arrays = [cupy.asarray(array) for array in host]
    own = [fa_ext.to_device(array) for array in host]
    wanted = fa_ext.to_numpy(fa_ext.attention(*own))
    failures = []

    def work(n):
        try:
            for _ in range(50):
                if n % 3 == 0:
                    stream = torch.cuda.Stream()
                    stream.wait_stream(torch.cuda.default_stream())
                    with torch.cuda.stream(stream):
                        given = fa_ext.attention(*tensors).cpu().numpy()
                elif n % 3 == 1:
                    with cupy.cuda.Stream(non_blocking=True):
                        given = fa_ext.attention(*arrays).get()
                else:
                    given = fa_ext.to_numpy(fa_ext.attention(*own))
                np.testing.assert_array_equal(given, wanted)
        except BaseException as error:  # noqa: BLE001
            failures.append(error)

    torch.cuda.synchronize()
    threads = [threading.Thread(target=work, args=(n,)) for n in range(9)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures, failures[0]


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
@pytest.mark.filterwarnings("ignore:.*fork.*:RuntimeWarning")
def test_fork_after_cuda(host, request):
    if ran_alone(request):
        return
    fa_ext.attention(*(fa_ext.to_device(array) for array in host))
    child = os.fork()
    if child == 0:
        status = 1
        try:
            fa_ext.to_device(host[0])
        except fa_ext.CudaError as error:
            on_cpu = fa_ext.attention(*host)
            status = 0 if "spawn" in str(error) and np.isfinite(on_cpu).all() else 2
        finally:
            os._exit(status)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
