"""Two CUDA devices: a call runs where its arrays are, on the streams of that device, and leaves the current device alone.

Runs on a machine with two GPUs; device 0 is current throughout, unless a test says otherwise.
"""

import gc
import os
import subprocess
import sys
import threading

import numpy as np
import pytest

import fa_ext
from tests.arrays.producers import Interface

pytestmark = pytest.mark.gpu
SHAPE = (2, 4, 160, 128)
CYCLES = 100_000_000  # a delay of some 50 ms


@pytest.fixture(scope="module", autouse=True)
def two_devices():
    if fa_ext._core.device_count() < 2:
        pytest.skip("needs two devices")


@pytest.fixture(scope="module")
def host():
    random = np.random.default_rng(0)
    return [random.standard_normal(SHAPE).astype(np.float16) for _ in range(3)]


@pytest.fixture(scope="module")
def wanted(host):
    return fa_ext.attention(*(array.astype(np.float32) for array in host), causal=True)


@pytest.fixture
def torch():
    module = pytest.importorskip("torch")
    module.cuda.set_device(0)
    yield module
    assert module.cuda.current_device() == 0
    module.cuda.synchronize(0)
    module.cuda.synchronize(1)


@pytest.fixture
def cupy():
    module = pytest.importorskip("cupy")
    module.cuda.Device(0).use()
    yield module
    assert module.cuda.runtime.getDevice() == 0


def close(given, wanted):
    np.testing.assert_allclose(fa_ext.to_numpy(given).astype(np.float32), wanted, rtol=0, atol=2e-3)


def on_both(host):
    return [[fa_ext.to_device(array, device=index) for array in host] for index in (0, 1)]


# ---- the current device ----


def test_own_arrays(torch, host, wanted):
    first, second = on_both(host)
    for arrays, name in ((second, "cuda:1"), (first, "cuda:0"), (second, "cuda:1")):
        out, lse = fa_ext.attention(*arrays, causal=True, return_lse=True)
        assert (out.device, lse.device, torch.cuda.current_device()) == (name, name, 0)
        close(out, wanted)
        assert fa_ext.attention(*arrays, causal=True, out=out) is out
        assert torch.cuda.current_device() == 0
    for arrays in (first, second):
        with torch.cuda.device(1):
            close(fa_ext.attention(*arrays, causal=True), wanted)
            assert torch.cuda.current_device() == 1


def test_memory_goes_back_from_another_device(torch):
    free = []
    for _ in range(3):
        for _ in range(20):
            fa_ext.to_device(np.zeros(1 << 24, np.float32), device=1)  # 64 MiB
        gc.collect()
        torch.cuda.synchronize(1)
        free.append(torch.cuda.mem_get_info(1)[0])
    assert abs(free[2] - free[1]) < 1 << 28


def test_a_failing_call_restores_it(torch, host):
    (first, q0, _), (q, k, v) = on_both(host)
    with pytest.raises(ValueError, match="k is on CUDA device 0, but q is on CUDA device 1"):
        fa_ext.attention(q, q0, v)
    with pytest.raises(ValueError, match="out is on CUDA device 0, but q is on CUDA device 1"):
        fa_ext.attention(q, k, v, out=first)
    with pytest.raises(fa_ext.UnsupportedError):
        fa_ext.attention(q, k, v, softcap=1.0, kernel="minimal")
    assert torch.cuda.current_device() == 0
    fa_ext.attention(q, k, v)
    torch.cuda.synchronize(1)


def on_stream(array, stream):
    """The array as another library would show it that works on this stream."""
    return Interface({**array.__cuda_array_interface__, "stream": stream})


def test_a_stream_of_the_other_device(torch, host, wanted):
    """CUDA would run the kernel over there, on memory that device cannot reach."""
    _, (q, k, v) = on_both(host)
    out = fa_ext.attention(q, k, v)
    before = fa_ext.to_numpy(out)
    torch.cuda.synchronize(1)
    other, own = torch.cuda.Stream(device=0), torch.cuda.Stream(device=1)
    for stream in (other, other.cuda_stream):
        with pytest.raises(ValueError, match="stream belongs to CUDA device 0, but q is on CUDA device 1"):
            fa_ext.attention(q, k, v, causal=True, out=out, stream=stream)
    with pytest.raises(ValueError, match="q's interface stream belongs to CUDA device 0, but q is on CUDA device 1"):
        fa_ext.attention(on_stream(q, other.cuda_stream), k, v, causal=True, out=out)
    torch.cuda.synchronize(0)
    torch.cuda.synchronize(1)
    np.testing.assert_array_equal(fa_ext.to_numpy(out), before)
    for stream in (own, own.cuda_stream):
        close(fa_ext.attention(q, k, v, causal=True, stream=stream), wanted)
    close(fa_ext.attention(on_stream(q, own.cuda_stream), k, v, causal=True), wanted)
    torch.cuda.synchronize(1)


def test_an_input_filled_by_a_stream_of_the_other_device(torch, host, wanted):
    """It is waited for on the host: its device has no events that the stream of the call could wait for."""
    sources = [torch.from_numpy(array).to("cuda:1") for array in host]
    keys = torch.zeros_like(sources[1])
    other, own = torch.cuda.Stream(device=0), torch.cuda.Stream(device=1)
    torch.cuda.synchronize(1)
    near = torch.from_numpy(host[1]).to("cuda:0")
    torch.cuda.synchronize(0)
    with torch.cuda.stream(other):
        torch.cuda._sleep(CYCLES)
        keys.copy_(near, non_blocking=True)
    out = fa_ext.attention(sources[0], on_stream(keys, other.cuda_stream), sources[2], causal=True, stream=own)
    own.synchronize()
    close(out, wanted)


def test_each_kernel_on_both_devices(cuda_forward, host):
    """Kernels, shared memory, workspace and libraries are set up for each device."""
    kinds = [array.astype(np.float32) for array in host], host
    outs = {}
    for arrays in kinds:
        try:
            fa_ext.attention(*(fa_ext.to_device(array) for array in arrays), kernel=cuda_forward)
        except fa_ext.UnsupportedError:
            continue
        for index in (0, 1, 0, 1):
            out = fa_ext.attention(*(fa_ext.to_device(array, device=index) for array in arrays), kernel=cuda_forward)
            bits = fa_ext.to_numpy(out).tobytes()
            assert outs.setdefault(arrays[0].dtype, bits) == bits
    assert outs


# ---- libraries ----


def test_torch(torch, host, wanted):
    arrays = [torch.from_numpy(array).to("cuda:1") for array in host]
    out, lse = fa_ext.attention(*arrays, causal=True, return_lse=True)
    assert out.device == lse.device == arrays[0].device
    close(out, wanted)
    pair = (torch.full_like(out, float("nan")), torch.full_like(lse, float("nan")))
    assert fa_ext.attention(*arrays, causal=True, out=pair) is pair
    assert torch.equal(pair[0], out) and torch.equal(pair[1], lse)


@pytest.mark.parametrize("given", [None, "object", "address"])
def test_torch_stream_of_the_other_device(torch, host, wanted, given):
    """The arrays are filled late, on a stream of their device, while device 0 and a stream of its own are current."""
    sources = [torch.from_numpy(array).to("cuda:1") for array in host]
    arrays = [torch.zeros_like(source) for source in sources]
    out = torch.zeros_like(arrays[0])
    side, here = torch.cuda.Stream(device=1), torch.cuda.Stream(device=0)
    torch.cuda.synchronize(1)
    with torch.cuda.stream(side):
        torch.cuda._sleep(CYCLES)
        for array, source in zip(arrays, sources, strict=True):
            array.copy_(source)
        with torch.cuda.stream(here):
            assert torch.cuda.current_device() == 0
            stream = {None: None, "object": side, "address": side.cuda_stream}[given]
            fa_ext.attention(*arrays, causal=True, out=out, stream=stream)
            new = fa_ext.attention(*arrays, causal=True, stream=stream)
            assert torch.cuda.current_device() == 0
        seen, seen_new = out.clone(), new.clone()
    side.synchronize()
    close(seen, wanted)
    close(seen_new, wanted)


def test_torch_graph(torch, host, wanted):
    arrays = [torch.from_numpy(array).to("cuda:1") for array in host]
    out = fa_ext.attention(*arrays, causal=True)
    torch.cuda.synchronize(1)
    with torch.cuda.device(1):
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=torch.cuda.Stream()):  # torch's own is of the device where the process first captured
            fa_ext.attention(*arrays, causal=True, out=out)
    out.fill_(float("nan"))
    graph.replay()
    torch.cuda.synchronize(1)
    close(out, wanted)


def test_cupy(cupy, torch, host, wanted):
    """CuPy keeps a current stream for each device: that of the arrays counts."""
    with cupy.cuda.Device(1):
        sources = [cupy.asarray(array) for array in host]
        arrays = [cupy.zeros_like(source) for source in sources]
        out = cupy.zeros_like(arrays[0])
        there = cupy.cuda.Stream(non_blocking=True)
        cupy.cuda.Device(1).synchronize()
        with there:
            with torch.cuda.stream(torch.cuda.ExternalStream(there.ptr, device=1)):
                torch.cuda._sleep(CYCLES)
            for array, source in zip(arrays, sources, strict=True):
                array[...] = source
            with cupy.cuda.Device(0), cupy.cuda.Stream(non_blocking=True):
                fa_ext.attention(*arrays, causal=True, out=out)
                new = fa_ext.attention(*arrays, causal=True)
                assert cupy.cuda.runtime.getDevice() == 0 and new.device.id == 1
            seen, seen_new = out.copy(), new.copy()
        there.synchronize()
    close(seen, wanted)
    close(seen_new, wanted)


JAX_ON_THE_SECOND_DEVICE = """
import numpy as np, jax, fa_ext
assert jax.default_backend() == "gpu" and len(jax.devices()) > 1
random = np.random.default_rng(0)
host = [random.standard_normal((2, 4, 160, 128)).astype(np.float16) for _ in range(3)]
wanted = fa_ext.attention(*(array.astype(np.float32) for array in host), causal=True)
there = jax.devices()[1]
arrays = [jax.device_put(array, there) for array in host]
busy = jax.device_put(np.ones((4096, 4096), np.float32), there)
late = jax.jit(lambda x, y: x + (y @ y @ y @ y * 0)[0, 0].astype(x.dtype))
for _ in range(20):
    out = fa_ext.attention(*(late(array, busy) for array in arrays), causal=True)
    assert out.devices() == {there}
    np.testing.assert_allclose(fa_ext.to_numpy(out).astype(np.float32), wanted, rtol=0, atol=2e-3)
"""


def test_jax():
    """In a process of its own: JAX keeps a client on every device until the process ends."""
    pytest.importorskip("jax")
    environment = {**os.environ, "XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
    done = subprocess.run([sys.executable, "-X", "faulthandler", "-c", JAX_ON_THE_SECOND_DEVICE], capture_output=True,
                          text=True, timeout=300, env=environment)  # fmt: skip
    assert done.returncode == 0, done.stderr[-4000:]


def test_numba(host, wanted):
    cuda = pytest.importorskip("numba.cuda")
    if not cuda.is_available() or len(cuda.gpus) < 2:
        pytest.skip("Numba has no two GPUs")
    with cuda.gpus[1]:
        arrays = [cuda.to_device(array) for array in host]
    with cuda.gpus[0]:
        out = fa_ext.attention(*arrays, causal=True)
        close(out, wanted)
        assert cuda.current_context().device.id == 0
    with cuda.gpus[1]:
        np.testing.assert_allclose(out.copy_to_host().astype(np.float32), wanted, rtol=0, atol=2e-3)


# ---- threads ----


def test_threads(torch, host):
    """Threads on both devices, half of them changing device with each call."""
    both = on_both(host)
    bits = fa_ext.to_numpy(fa_ext.attention(*both[0], causal=True)).tobytes()
    failures = []

    def work(n):
        try:
            torch.cuda.set_device(n % 2)
            for turn in range(50):
                index = (n + turn * (n // 2 % 2)) % 2
                out = fa_ext.attention(*both[index], causal=True)
                assert fa_ext.to_numpy(out).tobytes() == bits and out.device == f"cuda:{index}"
                assert torch.cuda.current_device() == n % 2
        except BaseException as error:  # noqa: BLE001
            failures.append(error)

    threads = [threading.Thread(target=work, args=(n,)) for n in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures, failures[0]
