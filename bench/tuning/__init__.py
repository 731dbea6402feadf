"""The search of ``bench tune``: spaces, strategies, how a variant is built and scored."""
