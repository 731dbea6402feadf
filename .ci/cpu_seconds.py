"""Runs a command and fails where it, with all its children, took more CPU seconds than it may: python3 cpu_seconds.py LIMIT COMMAND..."""

import resource
import subprocess
import sys

limit, *command = sys.argv[1:]
status = subprocess.run(command).returncode
used = resource.getrusage(resource.RUSAGE_CHILDREN)
seconds = used.ru_utime + used.ru_stime
print(f"{seconds:.0f} CPU seconds ({used.ru_utime:.0f} user, {used.ru_stime:.0f} system), of {limit} that it may take", flush=True)
if status == 0 and seconds > float(limit):
    sys.exit("over the limit: pytest's --durations above names the slowest tests")
sys.exit(status)
