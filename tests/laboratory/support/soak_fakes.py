"""A backend of ``bench soak`` on NumPy, whose kernels misbehave as their names say; any other name is a kernel of the CPU."""

import contextlib
import os
import signal
import threading
import time

import numpy as np

import fa_ext
from bench.problems.memory import ALIGNMENT, numpy_dtype


def words(array):
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8)


class Tally:
    def __init__(self):
        self.count = self.sent = 0

    def add(self, results, expected):
        self.count += sum(not np.array_equal(words(x), y) for x, y in zip(results, expected, strict=True))

    def send(self):
        self.sent = self.count

    def value(self):
        return self.sent


class Numpy:
    """Work is done when it is queued, unless its stream hangs."""

    REFUSALS = (fa_ext.UnsupportedError, ValueError)

    def __init__(self):
        self.local, self.hung, self.streams, self.measured = threading.local(), set(), 0, 0
        self.calls = self.grown = 0

    # ---- one call ----

    def problem(self, case):
        return case.make_inputs()

    def space(self, nbytes):
        return np.empty(nbytes, np.uint8)

    def bytes_of(self, case):
        rows = case.batch * case.heads * case.seq_q
        sizes = int(np.prod(case.out_shape)) * numpy_dtype(case.dtype).itemsize, 4 * rows
        return sum(-(-size // ALIGNMENT) * ALIGNMENT for size in sizes)

    def outputs(self, case, lse, space):
        made, begin = [], 0
        for shape, dtype in ((case.out_shape, case.dtype), ((case.batch, case.heads, case.seq_q), "float32"))[: 1 + lse]:
            nbytes = int(np.prod(shape)) * numpy_dtype(dtype).itemsize
            made.append(space[begin : begin + nbytes].view(numpy_dtype(dtype)).reshape(shape))
            begin += -(-nbytes // ALIGNMENT) * ALIGNMENT
        return made

    def attend(self, kernel, arguments, outputs, lse):
        stream, self.calls = getattr(self.local, "stream", None), self.calls + 1
        if kernel == "refuses":
            raise fa_ext.UnsupportedError("takes nothing")
        if kernel == "hangs_alone" and stream is None:
            time.sleep(1e3)
        runs = kernel if kernel in fa_ext.kernels() else "cpu_simd"
        if kernel == "idle" and stream and outputs:
            return outputs  # what an earlier call has left there
        if outputs is None:
            result = fa_ext.attention(**arguments, return_lse=lse, kernel=runs)
            outputs = list(result) if lse else [result]
        else:
            fa_ext.attention(**arguments, out=tuple(outputs) if lse else outputs[0], kernel=runs)
        if kernel == "unwritten":
            outputs[0].reshape(-1)[-1] = np.nan
        if kernel == "drifts" and stream is None:
            outputs[0].reshape(-1)[0] += self.calls
        if stream:
            self.misbehave(kernel, outputs, stream)
        return outputs

    def misbehave(self, kernel, outputs, stream):
        """Under load alone."""
        if kernel == "wrong" and stream == 2:
            words(outputs[-1])[-1] ^= 1
        if kernel == "dies" and self.calls > 100:
            os.kill(os.getpid(), signal.SIGKILL)
        if kernel == "raises" and self.calls > 100:
            raise RuntimeError("an illegal memory access was encountered\nand more lines")
        if kernel == "hangs" and self.calls > 100 and stream == 2:
            self.hung.add(stream)
        if kernel == "blocks" and self.calls > 100 and stream == 1:
            time.sleep(1e3)

    def poison(self, arrays):
        for array in arrays:
            array.fill(np.nan)

    def kept(self, results):
        return [words(result).copy() for result in results]

    def written(self, results):
        return not np.isnan(results[0].astype(np.float32)).any()

    def tally(self):
        return Tally()

    def damage(self, arguments):
        return []

    # ---- streams ----

    def stream(self):
        self.streams += 1
        return self.streams

    @contextlib.contextmanager
    def on(self, stream):
        self.local.stream = stream
        yield
        self.local.stream = None

    def event(self):
        return [None]

    def record(self, event, stream):
        event[0] = stream

    def done(self, event):
        return event[0] not in self.hung

    def synchronize(self):
        pass

    def memory(self):
        self.measured += 1
        return 1 << 30

    def capture(self, work, stream):
        with self.on(stream):
            work()
        return work

    def load(self, name):
        return (lambda: None), 3


class Leaking(Numpy):
    def memory(self):
        return (super().memory() + (self.measured << 30)) if self.measured else super().memory()


class Unusable(Numpy):
    def __init__(self):
        from bench import report

        raise report.UsageError("needs 20 GiB of free device memory; 3.0 are free")


class Writing(Numpy):
    """Of a kernel that writes where it should not."""

    def damage(self, arguments):
        return ["k changed"]
