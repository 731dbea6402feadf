"""The load of ``bench soak``: streams that are kept busy, and the watchdog outside."""
