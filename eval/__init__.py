"""Evaluation tools and test models of sglang-reasoncache."""
