"""The load of ``bench soak``: lanes that keep streams busy, and the watchdog outside."""
