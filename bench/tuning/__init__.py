"""What ``bench tune`` searches: spaces, strategies, how a variant is built and scored."""
