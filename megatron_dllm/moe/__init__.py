"""Mixture of experts: router, experts, permutation."""
