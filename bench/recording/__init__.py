"""The evidence record, and the suites whose outcome goes into it."""
